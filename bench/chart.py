# SPDX-License-Identifier: Apache-2.0
"""Draws a result of peers.py with matplotlib: a row of three panels for each section, which show time, rate and memory of each peer.

The same result gives the same bytes of SVG with the same matplotlib, so that a kept chart can be checked. matplotlib is imported
when something is drawn: nothing else of the benchmark needs it.
"""
import os

OURS, PEER, DARK, LIGHT, LINE = "#0b6e4f", "#9db4c0", "#41576b", "#c7d3da", "#b23a48"
CEILINGS = {"link": "link", "cached": "page cache", "storage": "storage", "memory": "memory"}
MIB = 2**20


def median(row, figure, scale=1.0):
    """A row's median, or None."""
    return row[figure]["median"] / scale if row.get(figure) else None


def host_mib(row):
    """The larger of what the process and what the machine had in use: pinned memory is seen by the second alone."""
    known = [value for value in (median(row, "host_rss_bytes", MIB), median(row, "host_used_bytes", MIB)) if value is not None]
    return max(known) if known else None


def ceilings_of(section):
    """Those that matter for the state, by name."""
    wanted = ("link", "cached") if section["state"] == "warm" else ("storage",)
    rates = {name: section["ceilings"][name]["gb_per_second"]["median"] for name in wanted if name in section["ceilings"]}
    return {CEILINGS[name]: rate for name, rate in rates.items()}


def sorted_rows(section):
    """The slowest first, which is drawn at the bottom; what failed is below all."""
    return sorted(section["rows"], key=lambda row: median(row, "gb_per_second") or -1)


def colour(row):
    return OURS if row["peer"].startswith("headrace") else PEER


def write_beside(axes, values, form):
    """Figures at the ends of the bars."""
    for place, value in enumerate(values):
        if value is not None:
            axes.annotate(form(value), (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)


def draw_names(axes, rows):
    axes.set_yticks(range(len(rows)), [row["peer"] for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows):
        label.set_fontweight("bold" if colour(row) == OURS else "normal")


def draw_time(axes, rows):
    """Until the last tensor; a mark where the first one was there."""
    times = [median(row, "seconds") for row in rows]
    axes.barh(range(len(rows)), [time or 0 for time in times], color=[colour(row) for row in rows], height=0.7)
    for place, row in enumerate(rows):
        first = median(row, "first_tensor_seconds")
        if first:
            axes.plot([first, first], [place - 0.35, place + 0.35], color="black", linewidth=1.2)
    known = [time for time in times if time]
    if known:
        axes.set_xscale("log")
        axes.set_xlim(min(known) / 12, max(known) * 4)
    write_beside(axes, times, lambda value: f"{value:.2f}")
    axes.set_xlabel("seconds (log); black: first tensor")


def draw_rate(axes, rows, section):
    """Median, smallest and largest; the machine's ceilings as dashed lines."""
    rates = [median(row, "gb_per_second") for row in rows]
    axes.barh(range(len(rows)), [rate or 0 for rate in rates], color=[colour(row) for row in rows], height=0.7)
    for place, row in enumerate(rows):
        rate = row.get("gb_per_second")
        if rate:
            axes.plot([rate["min"], rate["max"]], [place, place], color="black", linewidth=1.2)
        else:
            error = row.get("error") or "no sample"
            axes.annotate(error if len(error) < 60 else error[:57] + "...", (0, place), (4, 0), textcoords="offset points",
                          va="center", fontsize=7)
    for side, (name, rate) in zip(("right", "left"), sorted(ceilings_of(section).items(), key=lambda item: item[1])):
        axes.axvline(rate, color=LINE, linestyle="--", linewidth=1)
        axes.annotate(f"{name} {rate:.1f}", (rate, 1.0), (2 if side == "right" else -2, 2), xycoords=("data", "axes fraction"),
                      textcoords="offset points", ha=side, fontsize=7, color=LINE)
    axes.set_xlim(0, 1.18 * max([rate for rate in rates if rate] + list(ceilings_of(section).values()) + [1e-3]))
    write_beside(axes, rates, lambda value: f"{value:.1f}")
    axes.set_xlabel("GB/s; line: smallest to largest")


def draw_memory(axes, rows):
    """Above what was there before and the tensors themselves."""
    kinds = [("GPU", DARK, 0.18, [median(row, "extra_gpu_bytes", MIB) for row in rows]),
             ("host", LIGHT, -0.18, [host_mib(row) for row in rows])]
    for name, tone, shift, values in kinds:
        places = [place + shift for place in range(len(rows))]
        axes.barh(places, [max(value or 0, 1) for value in values], color=tone, height=0.34, label=name)
        for place, value in zip(places, values):
            if value is not None:
                axes.annotate(f"{max(value, 0):,.0f}", (max(value, 1), place), (3, 0), textcoords="offset points",
                              va="center", fontsize=6.5)
    known = [value for _, _, _, values in kinds for value in values if value]
    axes.set_xscale("log")
    axes.set_xlim(1, 6 * max(known + [10]))
    axes.legend(loc="lower right", fontsize=7)
    axes.set_xlabel("MiB beside the tensors (log)")


def figure(result):
    """The chart of a result, as a matplotlib figure."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "headrace", "svg.fonttype": "none", "font.size": 9})
    sections = result["sections"]
    heights = [0.31 * len(section["rows"]) + 1.15 for section in sections]
    drawn = Figure(figsize=(13, sum(heights) + 0.7), layout="constrained")
    parts = drawn.subfigures(len(sections), 1, height_ratios=heights, squeeze=False)[:, 0]
    for section, part in zip(sections, parts):
        rows = sorted_rows(section)
        part.suptitle(f"{section['model']}, {section['state']}: {section['tensors']:,} tensors, {section['bytes'] / 1e9:.1f} GB, "
                      "every tensor kept", fontsize=11, fontweight="bold", x=0.01, ha="left")
        time, rate, memory = part.subplots(1, 3, sharey=True)
        draw_time(time, rows)
        draw_rate(rate, rows, section)
        draw_memory(memory, rows)
        draw_names(time, rows)
        for axes in (time, rate, memory):
            axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
    facts = result["machine"]
    drawn.supxlabel(f"{result['headrace']} · {facts['gpu']}, driver {facts['driver']} · {facts['cores']} cores · kernel {facts['kernel']} · "
                    f"{result['date'][:10]} · medians", fontsize=8, x=0.01, ha="left")
    return drawn


def write(result, base):
    """Makes BASE.svg and BASE.png; their names."""
    drawn = figure(result)
    names = [base + ".svg", base + ".png"]
    drawn.savefig(names[0], metadata={"Date": None})
    drawn.savefig(names[1], dpi=110, metadata={"Software": None})
    return names


def base_of(path):
    """The name of a chart, from the name of its result or what the user gave: without its ending."""
    base, ending = os.path.splitext(path)
    return base if ending in (".json", ".svg", ".png") else path
