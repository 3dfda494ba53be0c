"""Networks: encoders, and what is built on them."""
