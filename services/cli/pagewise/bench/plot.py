"""Draws what a benchmark has measured."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagewise.bench.metrics import Outcome, latencies

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which people who do not tell red from green tell apart."""

_BINS, _BIN_SECONDS = 60, 0.5
"""Intervals of the output over time: at most so many, and not much shorter."""


def plot(result: dict[str, Any], outcomes: dict[str, list[list[Outcome]]], options: Namespace, path: Path) -> None:
    """Draw TTFT, ITL and E2E as cumulative distributions and the output over time, a line for each server.

    Distributions are of all rounds together, the output over time is that of the last round. Bounds of ``--goodput``
    are dashed lines.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "pagewise", "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
        slos = dict(options.goodput)
        _distribution(axes[0][0], outcomes, "ttft", "time to the first token (TTFT)", slos.get("ttft"))
        gap = "tpot" if "tpot" in slos else "itl"
        titles = {"tpot": "time per output token (TPOT)", "itl": "time between events (ITL)"}
        _distribution(axes[0][1], outcomes, gap, titles[gap], slos.get("tpot"))
        _distribution(axes[1][0], outcomes, "e2el", "time to the last token (E2E)", slos.get("e2el"))
        _output(axes[1][1], outcomes)
        figure.suptitle(_title(result), fontsize=11)
        handles, labels = axes[1][1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _title(result: dict[str, Any]) -> str:
    told = result["settings"]
    rate, most = told["request_rate"], told["max_concurrency"]
    if rate == "inf":
        arrival = f"a closed loop of {most}" if most else "all at once"
    else:
        arrival = f"{rate:g} requests/s" + (f", {most} at once at most" if most else "")
    amounts = [f"{told['num_prompts']} requests"] if told["num_prompts"] else []
    amounts += [f"{told['duration']:g} s"] if told["duration"] else []
    amount = " or ".join(amounts)
    models = ", ".join(dict.fromkeys(server["model"].rsplit("/", 1)[-1] for server in result["servers"]))
    return f"{models}: {told['dataset_name']}, {amount}, {arrival}"


def _distribution(
    axes: Any, outcomes: dict[str, list[list[Outcome]]], name: str, title: str, bound: float | None
) -> None:
    largest = 0.0
    for colour, (server, rounds) in zip(_cycle(), outcomes.items(), strict=False):
        values = sorted(1e3 * value for outcome in rounds for value in latencies(outcome)[name])
        if not values:
            continue
        largest = max(largest, values[-1])
        shares = [100 * (number + 1) / len(values) for number in range(len(values))]
        axes.step(values, shares, where="post", color=colour, label=server, linewidth=1.8)
    if bound is not None:
        axes.axvline(bound, color="#555555", linestyle="--", linewidth=1)
        axes.annotate(
            f"SLO {bound:g} ms", (bound, 2), rotation=90, fontsize=8, ha="right", va="bottom", color="#555555"
        )
    axes.set(
        title=title,
        xlabel="ms",
        ylabel="% of requests" if name != "itl" else "% of gaps",
        ylim=(0, 100),
        xlim=(0, None),
    )
    axes.title.set_fontsize(10)
    axes.grid(alpha=0.25)


def _output(axes: Any, outcomes: dict[str, list[list[Outcome]]]) -> None:
    for colour, (server, rounds) in zip(_cycle(), outcomes.items(), strict=False):
        times, rates = output_over_time(rounds[-1])
        axes.step(times, rates, where="post", color=colour, label=server, linewidth=1.8)
    axes.set(title="output over time", xlabel="s", ylabel="tokens/s", xlim=(0, None), ylim=(0, None))
    axes.title.set_fontsize(10)
    axes.grid(alpha=0.25)


def output_over_time(outcomes: Sequence[Outcome]) -> tuple[list[float], list[float]]:
    """Return the beginnings of equal intervals, in seconds, and the output tokens per second in each.

    A request's tokens are spread evenly over its events.
    """
    good = [one for one in outcomes if one.events]
    if not good:
        return [0.0], [0.0]
    start = min(one.sent for one in good)
    seconds = max(1e-6, max(one.events[-1] for one in good) - start)
    bins = max(1, min(_BINS, round(seconds / _BIN_SECONDS)))
    width = seconds / bins
    tokens = [0.0] * bins
    for one in good:
        each = one.tokens / len(one.events)
        for event in one.events:
            tokens[min(bins - 1, int((event - start) / width))] += each
    # The last one twice, because a step is drawn up to the next beginning.
    rates = [count / width for count in tokens]
    return [number * width for number in range(bins + 1)], [*rates, rates[-1]]


def _cycle() -> Sequence[str]:
    return _COLOURS * 4
