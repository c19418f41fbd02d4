"""The cost of features in schedulers that do not use them."""

import subprocess
import sys

from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.driving import executor_for, run


def test_a_service_without_requests_that_use_a_feature_does_not_import_it() -> None:
    code = (
        "import sys, pagewise_scheduler.main, pagewise_scheduler.service; "
        "names = ('adapters', 'beams', 'drafts', 'fair_shares', 'grammars', 'prefetches', 'segments', 'write_back'); "
        "loaded = {f'pagewise_scheduler.core.features.{name}' for name in names} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_plain_requests_use_no_feature() -> None:
    scheduler = create_scheduler(max_adapters=4)
    request = create_request()
    scheduler.add(request)
    run(scheduler, executor_for(scheduler))
    assert request.finished
    assert scheduler.features.in_use == []
