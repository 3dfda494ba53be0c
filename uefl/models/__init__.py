"""Networks: encoders, and the encoder → discretizer → classifier around them."""
