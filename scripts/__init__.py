# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tools for working on this project. A package, so that tests find it before the `scripts` that verl installs."""
