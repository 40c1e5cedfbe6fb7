"""The page's style: system fonts, figures of equal width, one accent colour, light and dark, and A4."""

from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #667079; --line: #dfe3e7; --paper: #fff; --tint: #f5f7f8;
  --accent: #0b6e75; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe4e8; --soft: #8e99a3; --line: #2d343b; --paper: #14181c; --tint: #1c2227; --accent: #4fb8bd; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 24px; line-height: 1.2; margin: 0 0 6px; font-weight: 650; letter-spacing: -.01em; }
h2 { font-size: 16px; margin: 34px 0 8px; padding-top: 10px; border-top: 2px solid var(--ink); font-weight: 650; }
h3, caption { font-size: 13px; font-weight: 650; text-align: left; margin: 0; padding: 10px 0 4px; }
p { margin: 4px 0; max-width: 100ch; }
header p { color: var(--soft); }
.key, .note { font-size: 12px; color: var(--soft); }
.note { margin: 4px 0 14px; max-width: 140ch; }
blockquote { margin: 8px 0; padding: 2px 0 2px 12px; border-left: 3px solid var(--accent); max-width: 100ch; }
ul, ol { margin: 6px 0; padding-left: 22px; max-width: 110ch; }
li { margin: 2px 0; }
ol > li { margin: 8px 0; }
code { font: 12px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { margin: 6px 0; padding: 8px 10px; background: var(--tint); border: 1px solid var(--line); border-radius: 4px;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 16em; overflow-y: auto; }
.tiles { display: grid; grid-template-columns: repeat(6, 1fr); gap: 1px; margin: 18px 0 10px; background: var(--line);
  border: 1px solid var(--line); }
.tiles div { background: var(--paper); padding: 10px 12px; }
dt { font-size: 12px; color: var(--soft); }
dd { margin: 2px 0 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.25; }
dd small { display: block; font-size: 12px; font-weight: 400; color: var(--soft); }
dd small b { font-weight: 600; color: var(--ink); }
i { font-style: normal; font-weight: 400; font-size: .8em; color: var(--soft); }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 8px 32px; }
figure { margin: 10px 0 0; min-width: 0; }
figcaption { font-size: 12px; color: var(--soft); min-height: 3em; }
figcaption b { color: var(--ink); font-weight: 650; font-size: 13px; }
.legend { white-space: nowrap; }
.line { display: inline-block; width: 18px; border-top: 2px solid var(--accent); margin: 0 5px 3px 8px; }
.line.was { border-top: 1.5px solid var(--soft); opacity: .7; }
.chart { display: block; width: 100%; height: auto; }
.chart text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.chart path { fill: none; stroke-linejoin: round; }
.chart .grid { stroke: var(--line); stroke-width: 1; }
.chart .now { stroke: var(--accent); stroke-width: 2; }
.chart .was { stroke: var(--soft); stroke-width: 1.2; opacity: .55; }
.chart .hover { fill: transparent; }
.chart .hover:hover { fill: var(--accent); fill-opacity: .12; }
.halves { display: grid; grid-template-columns: 1fr 1fr; gap: 0 40px; align-items: start; }
.scroll { overflow-x: auto; }
table.narrow { max-width: 900px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); font-weight: 400; }
th:last-child, td:last-child { padding-right: 0; }
thead th { font-size: 12px; color: var(--soft); border-bottom: 1px solid var(--soft); vertical-align: bottom; line-height: 1.25; }
tbody th { overflow-wrap: anywhere; min-width: 8ch; }
tbody th.word { white-space: pre; }
.n { text-align: right; white-space: nowrap; }
thead .n { white-space: normal; }
.n + td:not(.n), .n + th:not(.n) { padding-left: 24px; }
.word { white-space: nowrap; }
td small { display: block; font-size: 11px; color: var(--soft); line-height: 1.2; }
.was { color: var(--soft); }
.barred { min-width: 150px; position: relative; }
.bar { float: left; width: calc(100% - 64px); height: 9px; margin-top: 5px; }
.bar rect { fill: var(--accent); }
@media screen and (max-width: 760px) {
  main { padding: 18px 14px 32px; }
  .charts, .halves { grid-template-columns: 1fr; }
  .tiles { grid-template-columns: repeat(2, 1fr); }
  .scroll table { min-width: 640px; }
  .halves table:nth-child(2) caption { display: none; }
  .halves table:nth-child(2) thead { visibility: collapse; }
}
@media print {
  @page { size: A4; margin: 14mm 12mm; }
  :root { color-scheme: light; --ink: #000; --soft: #555; --line: #ccc; --paper: #fff; --tint: #f5f5f5; --accent: #0b6e75; }
  body { font-size: 10px; }
  main { max-width: none; padding: 0; }
  h1 { font-size: 18px; }
  h2 { font-size: 13px; margin-top: 18px; break-after: avoid; }
  table { font-size: 9px; }
  h3, caption { font-size: 10px; break-after: avoid; }
  thead th, .key, .note, figcaption, dt, dd small, code { font-size: 8px; }
  figcaption b { font-size: 10px; }
  td small { font-size: 7.5px; }
  dd { font-size: 15px; }
  th, td { padding: 2px 6px 2px 0; }
  pre { max-height: none; overflow: visible; }
  .scroll { overflow: visible; }
  .barred { min-width: 90px; }
  tr, figure, pre, blockquote, li, .scroll, .halves { break-inside: avoid; }
  .chart .hover { display: none; }
}
"""
