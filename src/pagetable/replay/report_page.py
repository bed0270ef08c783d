"""What stands in every report: the page with gaps for `string.Template`, its colours, its style and its script."""

COLOURS = {  # on light, on dark. Those of policies also differ for people who see no red or no green.
    "--page": ("#ffffff", "#14171c"),
    "--card": ("#f5f7f9", "#1c2128"),
    "--ink": ("#1c2128", "#e6e9ee"),
    "--soft": ("#59636e", "#9aa4b0"),
    "--line": ("#dde2e7", "#30363d"),
    "--shade": ("#edf0f3", "#20262d"),
    "--bars": ("#7e93ad", "#6f87a6"),
    "--evicted": ("#8a94a0", "#7b8591"),
    "--partial_tail": ("#bac2cb", "#505a65"),
    "--in_flight": ("#a9b8a4", "#5d6f62"),
    "--disabled": ("#cdbfae", "#6a5d4e"),
    "--reset": ("#c9b3bb", "#6b505a"),
    "--never_seen": ("#e3e7eb", "#2b3138"),
    "--policy-0": ("#1769c0", "#4c8dff"),
    "--policy-1": ("#c94f28", "#dd5f35"),
    "--policy-2": ("#6b2a5e", "#dfa3d3"),
    "--policy-3": ("#1d7d5c", "#22936b"),
    "--policy-4": ("#b8901a", "#f7db5c"),
    "--policy-5": ("#3d1d8f", "#7468bd"),
    "--policy-6": ("#111820", "#eef2f6"),
    "--policy-7": ("#59636e", "#9aa4b0"),  # of any other
}

_LIGHT, _DARK = ("".join(f"{name}:{both[number]};" for name, both in COLOURS.items()) for number in (0, 1))

COLOUR_STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
@media print {{ :root {{ color-scheme: light; print-color-adjust: exact; -webkit-print-color-adjust: exact; }} }}
"""

STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 78rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0; font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h1 small { display: block; color: var(--soft); font-size: 0.85rem; font-weight: 600; letter-spacing: 0.03em; }
h2 { margin: 2.75rem 0 0.25rem; font-size: 1.15rem; }
p { margin: 0.25rem 0; max-width: 46rem; }
.soft { color: var(--soft); font-size: 0.9rem; overflow-wrap: anywhere; }
.answer { margin: 1.25rem 0; padding: 1rem 1.25rem; max-width: none; font-size: 1.1rem; background: var(--card);
  border-left: 4px solid var(--policy-0); border-radius: 6px; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 0.75rem 1.25rem;
  margin: 0; }
.facts dt { color: var(--soft); font-size: 0.8rem; }
.facts dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
.chart { height: 27rem; margin: 0.5rem 0 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
.pair .chart { height: 20rem; }
form { display: flex; flex-wrap: wrap; gap: 0 2rem; margin-top: 0.5rem; font-size: 0.9rem; }
fieldset { display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0; padding: 0; border: 0; align-items: center; }
label, .line { display: inline-flex; align-items: center; gap: 0.35rem; padding: 0.2rem 0; }
label { cursor: pointer; }
input { accent-color: var(--policy-0); margin: 0; width: 1rem; height: 1rem; }
.swatch { display: inline-block; width: 0.7em; height: 0.7em; margin-right: 0.4em; border-radius: 2px; }
.scroll { overflow-x: auto; margin-top: 0.75rem; }
table { border-collapse: collapse; width: 100%; min-width: 54rem; font-size: 0.85rem;
  font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th, td { padding: 0.3rem 0.42rem; text-align: right; white-space: nowrap; }
th { white-space: normal; min-width: 3.5rem; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
.rule td { border-top: 1px solid var(--line); }
td small { color: var(--soft); }
.bar { display: flex; min-width: 12rem; height: 0.9rem; border-radius: 3px; overflow: hidden; }
.bar i { flex: none; }
.glossary { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: 0.4rem 1.25rem;
  font-size: 0.9rem; }
.glossary dt { font-weight: 600; }
.glossary dd { margin: 0; max-width: 46rem; }
@media (max-width: 40rem) {
  body { padding: 1.25rem 1rem 3rem; }
  .chart { height: 24rem; }
  .glossary { grid-template-columns: 1fr; gap: 0; }
  .glossary dd { margin-bottom: 0.6rem; }
}
@media print {
  body { padding: 0; font-size: 11pt; }
  table { font-size: 7pt; line-height: 1.3; min-width: 0; }
  th, td { padding: 0.15rem 0.25rem; min-width: 0; }
  td small { display: block; }
  .scroll { overflow: visible; }
  .chart, .pair .chart { height: 320px; }
  form input { display: none; }
  form label:not(:has(:checked)), .modebar { display: none; }
  .bar { min-width: 7rem; }
  .pair { grid-template-columns: 1fr; }
  h2, .soft { break-after: avoid; }
  .chart, tr, .answer { break-inside: avoid; }
}
"""

SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("figures").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;

function coloured(value) {
  if (typeof value === "string") {
    return Object.hasOwn(data.colours, value) ? data.colours[value][Number(dark.matches && !printing)] : value;
  }
  if (Array.isArray(value)) return value.map(coloured);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, part]) => [key, coloured(part)]));
}

function draw() {
  const isTouched = matchMedia("(pointer: coarse)").matches; // then a finger scrolls the page, and nothing else
  for (const [id, figure] of Object.entries(data.figures)) {
    const { traces, layout } = coloured(figure);
    const chosen = new FormData(document.querySelector(`form[data-chart="${id}"]`) ?? undefined);
    const isChosen = ([name, value]) => chosen.getAll(name).includes(value);
    for (const trace of traces) trace.visible = Object.entries(trace.meta ?? {}).every(isChosen);
    layout.dragmode = isTouched ? false : "zoom";
    if (printing) Object.assign(layout, { width: 660, height: 320 }); // for a sheet of paper
    Plotly.react(id, traces, layout, {
      responsive: true,
      displaylogo: false,
      displayModeBar: isTouched ? false : "hover",
      modeBarButtons: [["toImage", "resetScale2d"]],
      toImageButtonOptions: { filename: id },
    });
  }
}

function print(now) {
  printing = now;
  draw();
}

draw();
document.addEventListener("change", draw);
dark.addEventListener("change", draw);
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$security">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$name: KV cache replay</title>
<style>$colours$style</style>
</head>
<body>
<header>
<h1><small>KV cache replay</small>$name</h1>
<p class="soft">$about</p>
</header>
<p class="answer">$answer</p>
<dl class="facts">
$facts
</dl>
<noscript><p>The charts need JavaScript; the tables do not.</p></noscript>

<h2>Hit rate and capacity</h2>
<p class="soft">How many of the blocks that prompts ask for are found, at each size of the cache. With each
request whole no policy is above MIN: what is between is what a better policy could win, above only memory helps.</p>
<form data-chart="hit-rate" autocomplete="off">$policies_legend</form>
<div class="chart" id="hit-rate" role="img" aria-label="Hit rate against capacity"></div>

<h2>Hit rate over time</h2>
<p class="soft">The same in stretches of the trace. The grey area is an infinite cache.</p>
<form data-chart="over-time" autocomplete="off">$rows_legend</form>
<div class="chart" id="over-time" role="img" aria-label="Hit rate over time"></div>

<h2>How far apart uses of a block are</h2>
<div class="pair">
<div>
<p class="soft">In blocks. LRU finds the accesses to the left of its capacity (the dotted lines), and no others.</p>
<div class="chart" id="distance" role="img" aria-label="Reuse distances in blocks"></div>
</div>
<div>
<p class="soft">In time: how long a block has to be kept to be found again.</p>
<div class="chart" id="interval" role="img" aria-label="Reuse intervals in time"></div>
</div>
</div>

<h2>Why blocks were missed</h2>
<p class="soft">$misses_about</p>
<div class="scroll">$misses</div>

<h2>All figures</h2>
<p class="soft">In bold the best policy of each capacity.</p>
<div class="scroll">$rows</div>

<h2>Glossary</h2>
<dl class="glossary">
$glossary</dl>
<script type="application/json" id="figures">$figures</script>
<script>$plotly</script>
<script>$script</script>
</body>
</html>
"""

MISSES_ABOUT = {
    "cache": "Shares of all block accesses. Memory and policies can win only what was seen before and is no longer "
    "there.",
    "timed": "Shares of admissions, by why the first block that had to be computed was not found. Memory and policies "
    "can win only what was seen before and is no longer there.",
}

GLOSSARY = """
<dt>block</dt><dd>K and V of so many tokens, with all that stands before them in the prompt: the unit that is kept,
found and evicted. Distinct blocks are those that the whole trace would fill.</dd>
<dt>block access</dt><dd>One block of one prompt. It is found if the cache holds it and all blocks before it.</dd>
<dt>infinite cache</dt><dd>One that never evicts: it misses only what is new.</dd>
<dt>LRU</dt><dd>Evicts the block that was used longest ago; the other policies are named as in the literature. Its
curve begins at the size that the largest request needs.</dd>
<dt>MIN</dt><dd>Belady's optimum: it knows the future, and evicts what is used again last. No policy finds more with the
same memory, as long as each request is served whole.</dd>
<dt>distance</dt><dd>Distinct blocks used between two uses of a block, the block itself among them.</dd>
<dt>seen before, no longer there</dt><dd>An infinite cache would have found it.</dd>
<dt>last block of a prompt</dt><dd>At least one token is always computed, so this block cannot be found.</dd>
<dt>never seen before</dt><dd>New content: nothing but computing helps.</dd>
<dt>refused</dt><dd>Requests that need more blocks than the cache has; they found nothing.</dd>
<dt>took</dt><dd>Seconds that the replay of this row took on the machine that made this page.</dd>
"""

GLOSSARY_OF_MODES = {
    "cache": """
<dt>of MIN</dt><dd>What a policy found, as a share of what MIN finds.</dd>
<dt>prefill</dt><dd>Blocks that had to be computed, over those of MIN: 1.10&nbsp;&times; is a tenth more work than
needed.</dd>
<dt>a block lived</dt><dd>Seconds of the trace from a block's filling to its eviction: the median, and in grey the range
of the middle 80 %.</dd>
""",
    "timed": """
<dt>in time</dt><dd>Requests arrive when they did and run together under the scheduler that serves; a cost model says
how long each step takes. Answers take blocks, too. MIN and the curves are those of requests one after the other.</dd>
<dt>waited</dt><dd>For a place in the batch. All times are medians, and in grey the 99th percentile.</dd>
<dt>TTFT</dt><dd>Time from a request's arrival to its first token.</dd>
<dt>ITL</dt><dd>Time between two tokens of an answer.</dd>
<dt>end to end</dt><dd>From a request's arrival to its last token.</dd>
<dt>preempted</dt><dd>How often a running request gave its blocks back to others, and had to start again later.</dd>
<dt>tokens/s</dt><dd>Tokens of answers, per second of the replay's clock.</dd>
<dt>being computed for another</dt><dd>Another request was computing the same block at that moment.</dd>
""",
}
