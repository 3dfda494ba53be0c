from harness import import_or_skip

import_or_skip("benchmarks", reason="benchmarks/ is not part of the package")
