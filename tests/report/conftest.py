import pytest
from browser import CHROMIUM, Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs Chromium: on Debian, apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
