# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`python -m recipe.agent_env.report RUN_DIR`: one HTML page and PNG plots of a training run.

Owns which metrics are plotted together and how they look. Refuses to know where they were logged (`run_metrics.py`).
"""

import argparse
import base64
import html
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from recipe.agent_env.tools.run_metrics import MetricsError, RunMetrics, read_run

_EXAMPLES = """\
examples:
  python -m recipe.agent_env.report outputs/run
  python -m recipe.agent_env.report my_project/my_experiment.jsonl -o report
  python -m recipe.agent_env.report train.log --title "GRPO, seed 1"

Reads what trainer.logger wrote: file (.jsonl), tensorboard (event files), mlflow (.db) or a saved console log.
"""

_COLOURS = ("#1f6f6b", "#cd571c", "#2563cd", "#8242a8", "#8a6d1b", "#b3312b", "#5b6770", "#3f8f4f")
_REASON_COLOURS = {
    "terminated": "#2c7a4b",
    "env_truncated": "#d9b36a",
    "max_turn": "#c98a3a",
    "context_full": "#a85b12",
    "parse_error": "#d77a72",
    "reply_cut": "#c2524b",
    "prompt_too_long": "#8d8d8d",
    "failed": "#7a1f1b",
}
_STYLE: Any = {
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.12,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#a39d93",
    "axes.labelcolor": "#6f6a62",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#ece8e1",
    "xtick.color": "#6f6a62",
    "ytick.color": "#6f6a62",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "axes.axisbelow": True,
}
_MOVING_AVERAGE_FROM = 40
"""Steps from which lines are drawn smoothed, with the raw numbers behind."""

_VALIDATION = r"val-core/.*/(?:{})/(?:mean|best|maj)@\d+(?:/mean)?"


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One plot."""

    name: str
    """Name of its PNG file."""
    title: str
    """Heading."""
    note: str
    """What to look for, for a reader who sees it the first time."""
    draw: Callable[[Any, RunMetrics], bool]
    """Draws on an axes; False when the run has nothing for it."""


def draw_lines(axes: Any, metrics: RunMetrics, names: dict[str, str], *, dashed: frozenset[str] = frozenset()) -> bool:
    """Lines of some metrics; those in `dashed` are drawn with markers, as rare points are.

    Args:
        axes: Where to draw.
        metrics: The run.
        names: Metric name to label.
        dashed: Metric names.

    Returns:
        Whether there was any.
    """
    present = {name: label for name, label in names.items() if metrics.points(name)[0]}
    for i, (name, label) in enumerate(present.items()):
        steps, values = metrics.points(name)
        colour = _COLOURS[i % len(_COLOURS)]
        if name in dashed:
            axes.plot(steps, values, color=colour, label=label, marker="o", markersize=4, linestyle="--", linewidth=1.2)
        elif len(steps) >= _MOVING_AVERAGE_FROM:
            axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
            axes.plot(steps, _smooth(values), color=colour, label=label, linewidth=1.8)
        else:
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps, values, color=colour, label=label, linewidth=1.8, marker=marker)
    return bool(present)


def _smooth(values: list[float], weight: float = 0.85) -> list[float]:
    """Exponential moving average without the pull towards 0 at its start."""
    average, total, smooth = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        smooth.append(average / total)
    return smooth


def _draw_returns(axes: Any, metrics: RunMetrics) -> bool:
    low, high = metrics.series.get("env/episode_return/min", {}), metrics.series.get("env/episode_return/max", {})
    steps = sorted(set(low) & set(high))
    if len(steps) > 1:
        axes.fill_between(
            steps,
            [low[s] for s in steps],
            [high[s] for s in steps],
            color=_COLOURS[0],
            alpha=0.1,
            linewidth=0,
            label="min to max",
        )
    validation = metrics.matching(_VALIDATION.format("reward"))
    names = {"env/episode_return/mean": "training"} | {name: _validation_label(name) for name in validation}
    return draw_lines(axes, metrics, names, dashed=frozenset(validation))


def _draw_success(axes: Any, metrics: RunMetrics) -> bool:
    validation = metrics.matching(_VALIDATION.format("acc"))
    per_env = metrics.matching(r"env/success_rate/.+")
    names = {"env/success_rate": "training"}
    if len(per_env) > 1:
        names |= {name: name.removeprefix("env/success_rate/") for name in per_env}
    names |= {name: _validation_label(name) for name in validation}
    axes.set_ylim(-0.03, 1.03)
    return draw_lines(axes, metrics, names, dashed=frozenset(validation))


def _validation_label(name: str) -> str:
    """`val-core/sokoban-v0/acc/mean@4` as `validation sokoban-v0 mean@4`."""
    match = re.fullmatch(r"val-core/(.+)/[^/]+/(\w+@\d+)(?:/mean)?", name)
    assert match is not None
    return f"validation {match.group(1)} {match.group(2)}"


def _draw_end_reasons(axes: Any, metrics: RunMetrics) -> bool:
    names = metrics.matching(r"env/end_reason/.+")
    steps = sorted({step for name in names for step in metrics.points(name)[0]})
    shares = {name.rpartition("/")[2]: [metrics.series[name].get(step, 0.0) for step in steps] for name in names}
    shares = {reason: values for reason, values in shares.items() if any(values)}
    ordered = sorted(shares, key=lambda reason: list(_REASON_COLOURS).index(reason) if reason in _REASON_COLOURS else 9)
    if not ordered:
        return False
    colours = [_REASON_COLOURS.get(reason, "#5b6770") for reason in ordered]
    if len(steps) == 1:
        bottom = 0.0
        for reason, colour in zip(ordered, colours, strict=True):
            axes.bar(steps, shares[reason], bottom=bottom, color=colour, label=reason, width=0.5)
            bottom += shares[reason][0]
    else:
        axes.stackplot(steps, [shares[r] for r in ordered], labels=ordered, colors=colours, linewidth=0)
    axes.set_ylim(0, 1)
    return True


def time_split(metrics: RunMetrics, step: int) -> dict[str, float]:
    """Seconds of one step by what they went into.

    The rollout's wall-clock time (`timing_s/gen`) is split as its slowest episode split its own: into waiting for the
    engine and waiting for the service. What `timing_s/step` has beyond all of them is `other`.
    """

    def seconds(*names: str) -> float:
        return sum(metrics.series.get(f"timing_s/{name}", {}).get(step, 0.0) for name in names)

    rollout = seconds("gen")
    engine, service = (
        seconds(f"agent_loop/slowest/{name}") or seconds(f"agent_loop/{name}/mean")
        for name in ("generate_sequences", "tool_calls")
    )
    service_share = service / (engine + service) if engine + service > 0 else 0.0
    split = {
        "generate": rollout * (1 - service_share),
        "environment": rollout * service_share,
        "log-probs, values": seconds("old_log_prob", "ref", "values", "adv", "reward"),
        "train": seconds("update_actor", "update_critic", "update_weights"),
    }
    split["other"] = max(0.0, seconds("step") - sum(split.values()))
    return split


def _draw_timings(axes: Any, metrics: RunMetrics) -> bool:
    steps = [step for step in metrics.points("timing_s/step")[0] if step in metrics.series.get("timing_s/gen", {})]
    if not steps:
        return False
    splits = [time_split(metrics, step) for step in steps]
    colours = ("#1f6f6b", "#c98a3a", "#8aa6d6", "#2563cd", "#d5d0c8")
    for i, (part, colour) in enumerate(zip(splits[0], colours, strict=True)):
        bottom = [sum(list(split.values())[:i]) for split in splits]
        width = 1.0 if len(steps) > _MOVING_AVERAGE_FROM else 0.75
        axes.bar(steps, [s[part] for s in splits], bottom=bottom, color=colour, label=part, width=width, linewidth=0)
    axes.set_ylabel("seconds")
    return True


def _lines(ylabel: str = "", **names: str) -> Callable[[Any, RunMetrics], bool]:
    """A panel of plain lines; `a__b` in a keyword stands for `a/b`."""
    metric_names = {name.replace("__", "/"): label for name, label in names.items()}

    def draw(axes: Any, metrics: RunMetrics) -> bool:
        axes.set_ylabel(ylabel)
        return draw_lines(axes, metrics, metric_names)

    return draw


PANELS = (
    Panel(name="return", title="Return", note="Reward of an episode, masked ones left out.", draw=_draw_returns),
    Panel(
        name="success",
        title="Success",
        note="Share of solved episodes, where the environment says so.",
        draw=_draw_success,
    ),
    Panel(
        name="end_reasons",
        title="How episodes end",
        note="max_turn, context_full: our limits cut them. failed: the service's or engine's fault, masked.",
        draw=_draw_end_reasons,
    ),
    Panel(
        name="turns",
        title="Turns",
        note="Per episode: replies of the policy, steps of the environment, tool calls sent.",
        draw=_lines(
            env__num_assistant_turns__mean="assistant turns",
            env__num_env_steps__mean="environment steps",
            env__num_tool_calls__mean="tool calls",
        ),
    ),
    Panel(
        name="lengths",
        title="Lengths",
        note="Tokens per episode. Responses hold the observations between turns.",
        draw=_lines(
            "tokens",
            prompt_length__mean="prompt",
            response_length__mean="response, mean",
            response_length__max="response, longest",
        ),
    ),
    Panel(
        name="mistakes",
        title="Mistakes and faults",
        note="Per turn: replies with a broken call, or cut at their limit. Per episode: failed, played again.",
        draw=_lines(
            env__parse_error_ratio="parse error",
            env__reply_cut_ratio="reply cut",
            env__empty_reply_ratio="empty reply",
            env__failed_episode_ratio="failed",
            env__restart_ratio="played again",
        ),
    ),
    Panel(
        name="kl",
        title="KL divergence",
        note="actor: between updates of one batch. rollout to trainer: on the same weights, so it should stay near 0.",
        draw=_lines(
            actor__ppo_kl="actor, old to new",
            actor__kl_loss="to the reference (loss)",
            actor__reward_kl_penalty="to the reference (reward)",
            rollout_corr__kl="rollout to trainer",
        ),
    ),
    Panel(
        name="entropy",
        title="Entropy",
        note="Of the policy on its own tokens. A fast fall to 0 is a collapse.",
        draw=_lines("nats", actor__entropy="actor", actor__entropy_loss="actor"),
    ),
    Panel(
        name="updates",
        title="Updates",
        note="Clipped share of tokens, explained share of the returns' variance (critic).",
        draw=_lines(actor__pg_clipfrac="actor clip fraction", critic__vf_explained_var="critic explained variance"),
    ),
    Panel(
        name="gradients",
        title="Gradient norms",
        note="Before clipping.",
        draw=_lines(actor__grad_norm="actor", critic__grad_norm="critic"),
    ),
    Panel(
        name="timings",
        title="Time of a step",
        note="Generate and environment share the rollout's time as its slowest episode did.",
        draw=_draw_timings,
    ),
    Panel(
        name="throughput",
        title="Throughput",
        note="Tokens of a batch, observations included, by the time of its step, per GPU.",
        draw=_lines("tokens/s", perf__throughput="tokens per second and GPU"),
    ),
)


def draw_panels(metrics: RunMetrics) -> dict[str, bytes]:
    """PNGs by panel name; panels without data are left out."""
    images = {}
    with plt.rc_context(_STYLE):
        for panel in PANELS:
            figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
            if panel.draw(axes, metrics):
                axes.set_title(panel.title, pad=10)
                axes.set_xlabel("step")
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
                axes.margins(x=0.01)
                handles, labels = axes.get_legend_handles_labels()
                if len(labels) > 1 or panel.name in ("return", "success"):
                    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.0, 1.0))
                buffer = BytesIO()
                figure.savefig(buffer, format="png", dpi=140)
                images[panel.name] = buffer.getvalue()
            plt.close(figure)
    return images


_SUMMARY = {
    "return, training": r"env/episode_return/mean",
    "success, training": r"env/success_rate",
    "return, validation": _VALIDATION.format("reward"),
    "success, validation": _VALIDATION.format("acc"),
    "failed episodes": r"env/failed_episode_ratio",
    "assistant turns": r"env/num_assistant_turns/mean",
    "response tokens": r"response_length/mean",
    "seconds per step": r"timing_s/step",
    "tokens/s per GPU": r"perf/throughput",
}


def summary_rows(metrics: RunMetrics) -> list[tuple[str, float, float, float]]:
    """Name, first, best (largest) and last value of what matters most."""
    rows = []
    for label, pattern in _SUMMARY.items():
        names = metrics.matching(pattern)
        for name in names:
            values = metrics.points(name)[1]
            if values:
                detail = f" ({_validation_label(name).removeprefix('validation ')})" if "val-" in name else ""
                rows.append((label + detail, values[0], max(values), values[-1]))
    return rows


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --bg: #fbfaf8; --card: #fff; --line: #e3dfd8; --text: #24211d; --quiet: #6f6a62; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --bg: #161718; --card: #1f2123; --line: #303336; --text: #e4e2dd; --quiet: #9c9a94; }}
  figure img {{ filter: invert(.9) hue-rotate(180deg); mix-blend-mode: screen; }}
}}
body {{ margin: 0; padding: 32px 24px 80px; background: var(--bg); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }}
main {{ max-width: 1240px; margin: 0 auto; }}
h1 {{ font-size: 24px; letter-spacing: -.015em; margin: 0 0 2px; }}
.quiet, figcaption {{ color: var(--quiet); font-size: 13px; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; margin: 22px 0; font-variant-numeric: tabular-nums; }}
th {{ font-weight: 500; color: var(--quiet); font-size: 13px; text-align: right; padding: 4px 0 4px 28px; }}
td {{ border-top: 1px solid var(--line); padding: 5px 0 5px 28px; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(560px, 100%), 1fr)); gap: 16px; }}
figure {{ margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }}
figure img {{ width: 100%; display: block; background: #fff; }}
figcaption {{ padding: 9px 14px 11px; border-top: 1px solid var(--line); }}
</style></head><body><main>
<h1>{title}</h1>
<p class="quiet">{steps}. Read from {source}.</p>
<table><tr><th></th><th>first</th><th>largest</th><th>last</th></tr>
{rows}
</table>
<div class="plots">
{figures}
</div>
</main></body></html>
"""


def render_report(metrics: RunMetrics, images: dict[str, bytes], *, title: str) -> str:
    """The report as one HTML file with its images inside."""
    rows = "\n".join(
        f"<tr><td>{html.escape(label)}</td>" + "".join(f"<td>{_shown(value)}</td>" for value in values) + "</tr>"
        for label, *values in summary_rows(metrics)
    )
    figures = "\n".join(
        f'<figure><img alt="{html.escape(panel.title)}" src="data:image/png;base64,'
        f'{base64.b64encode(images[panel.name]).decode("ascii")}">'
        f"<figcaption>{html.escape(panel.note)}</figcaption></figure>"
        for panel in PANELS
        if panel.name in images
    )
    steps = metrics.steps
    count = f"Steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"Step {steps[0]}"
    return _PAGE.format(
        title=html.escape(title), steps=count, source=html.escape(metrics.source), rows=rows, figures=figures
    )


def _shown(value: float) -> str:
    """A number with as many digits as say something."""
    return f"{value:,.0f}" if abs(value) >= 1000 else re.sub(r"(\.\d*?)0+$", r"\1", f"{value:.3f}").rstrip(".")


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.agent_env.report",
        description="Make one HTML page, and PNG files, of a run's returns, success, lengths, KL and timings.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of the run, or a metrics file")
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="folder to write (RUN_DIR/report)")
    parser.add_argument("--title", help="heading; by default the name of the run")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0, or 2 when there are no metrics.
    """
    args = build_parser().parse_args(arguments)
    out = args.out or (args.run if args.run.is_dir() else args.run.parent) / "report"
    try:
        metrics = read_run(args.run)
        images = draw_panels(metrics)
        out.mkdir(parents=True, exist_ok=True)
        for name, image in images.items():
            (out / f"{name}.png").write_bytes(image)
        title = args.title or args.run.resolve().stem
        (out / "report.html").write_text(render_report(metrics, images, title=title), encoding="utf-8")
    except (MetricsError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    print(f"{out / 'report.html'}: {len(metrics.steps)} steps, {len(images)} plots, read from {metrics.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
