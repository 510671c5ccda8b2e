# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The container files, which cannot be built here: linted, and run as far as they can be without a container engine."""
