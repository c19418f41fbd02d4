"""Command lines of ``pagewise up`` and the like, as far as they need no Ray."""

import pytest
from pagewise.cluster.commands import logs


def test_a_negative_number_of_lines_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        logs(["-n", "-1"])
    assert ended.value.code == 2
    assert "argument -n/--lines: invalid number of lines value: '-1'" in capsys.readouterr().err
