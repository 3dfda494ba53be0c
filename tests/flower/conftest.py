from harness import import_or_skip

import_or_skip("flwr")
