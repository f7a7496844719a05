"""Loss and gradients of every layout equal one process's: float64, two AdamW steps (`rotorch verify`).

Rows of the second step hold several documents, which tests/train/test_documents.py holds to be apart on one process.
"""

import pytest
from layouts import cells, more, says_new

from rotorch.strategies import cuts_context, parse_parallel
from rotorch.testing.verify import BAR, verify

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize(("layout", "model"), cells(more(), says_new=says_new))
def test_float64_parity(tiny, layout, model):
    documents = not cuts_context(parse_parallel(layout))  # several in one sequence are refused there
    report = verify(tiny(model), parallel=layout, layers=2, steps=2, documents=documents, timeout_s=300)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)
    assert report.max_rel_err_loss <= BAR
    assert report.max_rel_err_grad <= BAR
    assert report.num_modules_compared > 10
