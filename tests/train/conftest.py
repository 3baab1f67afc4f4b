"""Where whole runs go."""

from tests.support.run_fixtures import data_cache, dirs, module_dirs

__all__ = ["data_cache", "dirs", "module_dirs"]
