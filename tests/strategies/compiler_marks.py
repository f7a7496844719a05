"""Marks of tests in which torch compiles."""

import pytest

MARKS = [
    pytest.mark.usefixtures("warm"),
    # torch's own, when it compiles
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
