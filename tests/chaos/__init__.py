# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The chaos suite: real services behind a proxy that breaks things, and a check of every row against what happened."""
