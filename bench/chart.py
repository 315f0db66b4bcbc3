# SPDX-License-Identifier: Apache-2.0
"""Draws a result of peers.py as SVG: one panel for each section, a bar for each peer, the ceilings as dashed lines."""
import html

WIDTH = 960
LEFT = 210  # room for names
RIGHT = 300  # room for figures
BAR = 18
STEP = 26
HEAD = 66
FOOT = 34
COLOURS = {"headrace": "#0b6e4f", "peer": "#9db4c0", "line": "#b23a48", "text": "#222222", "grid": "#dddddd"}
CEILINGS = {"link": "link", "cached": "page cache", "storage": "storage", "memory": "memory"}


def text(x, y, what, size=12, anchor="start", colour="text", weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
            f'fill="{COLOURS[colour]}">{html.escape(what)}</text>')


def line(x1, y1, x2, y2, colour, width=1.0, dashes=""):
    extra = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{COLOURS[colour]}" '
            f'stroke-width="{width}"{extra}/>')


def tick_step(top):
    """1, 2 or 5 times a power of ten, so that there are four to ten ticks."""
    step = 10.0 ** -3
    while True:
        for factor in (1, 2, 5):
            if top / (step * factor) <= 8:
                return step * factor
        step *= 10


def mebibytes(figure):
    return "-" if not figure else f"{figure['median'] / 2**20:,.0f}"


def ceilings_of(section):
    """Those that matter for the state, by name."""
    wanted = ("link", "cached") if section["state"] == "warm" else ("storage",)
    rates = {name: section["ceilings"][name]["gb_per_second"]["median"] for name in wanted if name in section["ceilings"]}
    return {CEILINGS[name]: rate for name, rate in rates.items()}


def bar(row, y, scale):
    rate = row["gb_per_second"]
    kind = "headrace" if row["peer"].startswith("headrace") else "peer"
    middle = y + BAR / 2
    out = [text(LEFT - 8, middle + 4, row["peer"], anchor="end", weight="bold" if kind == "headrace" else "normal")]
    if not rate:
        error = row.get("error") or "no sample"
        return out + [text(LEFT + 4, middle + 4, error if len(error) < 100 else error[:97] + "...", 11)]
    out.append(f'<rect x="{LEFT}" y="{y:.1f}" width="{max(1, rate["median"] * scale):.1f}" height="{BAR}" '
               f'fill="{COLOURS[kind]}"/>')
    if rate["max"] > rate["min"]:
        out.append(line(LEFT + rate["min"] * scale, middle, LEFT + rate["max"] * scale, middle, "text", 1.5))
    columns = (f"{rate['median']:.2f}", f"{row['cpu_seconds_per_gb']['median']:.3f}", mebibytes(row["extra_gpu_bytes"]),
               mebibytes(row["host_rss_bytes"]))
    for i, what in enumerate(columns):
        out.append(text(WIDTH - RIGHT + 75 * (i + 1) - 10, middle + 4, what, anchor="end"))
    return out


def panel(section, y):
    """(SVG elements, height)"""
    rows = sorted(section["rows"], key=lambda row: -(row["gb_per_second"] or {"median": -1})["median"])
    ceilings = ceilings_of(section)
    fastest = max([row["gb_per_second"]["max"] for row in rows if row["gb_per_second"]] + list(ceilings.values()) + [1e-3])
    room = WIDTH - LEFT - RIGHT
    scale = room / (fastest * 1.05)
    top = y + HEAD
    bottom = top + STEP * len(rows)
    title = (f"{section['model']}, {section['state']}: {section['tensors']:,} tensors, {section['bytes'] / 1e9:.1f} GB, "
             "every tensor kept")
    out = [text(12, y + 18, title, 15, weight="bold")]
    for i, what in enumerate(("GB/s", "CPU-s/GB", "GPU +MiB", "RSS +MiB")):
        out.append(text(WIDTH - RIGHT + 75 * (i + 1) - 10, top - 8, what, 11, "end"))
    step = tick_step(fastest)
    for i in range(int(fastest * 1.05 / step) + 1):
        x = LEFT + i * step * scale
        out += [line(x, top - 4, x, bottom, "grid"), text(x, bottom + 14, f"{i * step:g}", 11, "middle")]
    for i, row in enumerate(rows):
        out += bar(row, top + i * STEP + (STEP - BAR) / 2, scale)
    for i, (name, rate) in enumerate(sorted(ceilings.items(), key=lambda item: item[1])):
        x = LEFT + rate * scale
        out += [line(x, top - 4, x, bottom, "line", 1.2, "5 3"),
                text(x - 4 if i % 2 == 0 else x + 4, top - 10 - 14 * (i % 2), f"{name} {rate:.1f}", 11,
                     "end" if i % 2 == 0 else "middle", "line")]
    return out, bottom + FOOT - y


def draw(result):
    facts = result["machine"]
    body = []
    y = 44.0
    for section in result["sections"]:
        elements, height = panel(section, y)
        body += elements
        y += height
    about = f"{result['headrace']} · {facts['gpu']}, driver {facts['driver']} · {facts['cores']} cores · kernel " \
            f"{facts['kernel']} · {result['date'][:10]}"
    body += [text(12, 24, "Loading a model: medians, with smallest and largest as a line", 13),
             text(12, y + 6, about, 11)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 18:.0f}" ' \
           f'viewBox="0 0 {WIDTH} {y + 18:.0f}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>"]) + "\n"
