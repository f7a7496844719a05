import subprocess
import sys

import pytest


@pytest.mark.parametrize("first", ["import rotorch.parallelize", pytest.param("pass", marks=pytest.mark.slow)])
def test_parallelize_is_the_function_whatever_was_imported_first(first):
    code = f"{first}\nimport rotorch\nassert callable(rotorch.parallelize), rotorch.parallelize"
    subprocess.run([sys.executable, "-c", code], check=True)
