"""The report on one or more runs: a single HTML file, without scripts and without requests to the network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from forge.observe.json_lines import utc_now
from forge.tools.report.course import course_sections, summary
from forge.tools.report.findings import findings
from forge.tools.report.inside import inside_sections
from forge.tools.report.parts import Findings, PageSection
from forge.tools.report.read import RunRecord
from forge.tools.report.setting import setting_sections

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.5 Helvetica, Arial, 'Liberation Sans', sans-serif; color: #1c1c1c; background: #fff;
  margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 1180px; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; padding-bottom: .25rem; border-bottom: 1px solid #ccc; }
p { margin: .3rem 0 .8rem; max-width: 75ch; }
nav { margin: .6rem 0 0; } nav a { margin-right: 1rem; color: #0b57a4; }
.made { color: #555; margin: 0; }
.parts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem 1.25rem; }
.parts > * { grid-column: 1 / -1; min-width: 0; }
.parts > figure.half { grid-column: auto; }
figure { margin: 0; } figure svg { width: 100%; height: auto; display: block; }
figcaption { font-weight: 600; font-size: .9rem; }
details { font-size: .85rem; color: #333; } summary { cursor: pointer; color: #0b57a4; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: .3rem 0 .6rem; }
caption { text-align: left; font-weight: 600; padding: .2rem 0; white-space: nowrap; }
th, td { padding: .16rem .7rem .16rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4; }
th[scope=row] { font-weight: 500; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
thead th { border-bottom: 1px solid #999; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: .6rem; margin: .2rem 0;
  font-size: .82rem; }
.findings { background: #fff8e6; border-left: 4px solid #E69F00; margin: .4rem 0; padding: .7rem 1rem .7rem 2rem;
  max-width: 100%; }
.findings li { margin: .15rem 0; }
@media (max-width: 760px) { .parts > figure.half { grid-column: 1 / -1; } }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, summary { display: none; }
  details::details-content { content-visibility: visible; height: auto; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; }
  .scroll { overflow: visible; }
}
"""


def make_page(runs: Sequence[RunRecord], refresh_s: int = 0, extra: Sequence[PageSection] = ()) -> str:
    """Return the report as an HTML page.

    refresh_s: reload interval of the page in a browser, in seconds; 0: never. extra: sections before all others.
    """
    names = ", ".join(run.name for run in runs)
    sections = [
        *extra,
        PageSection("Summary", parts=[summary(runs)]),
        PageSection("What stands out", parts=[Findings(findings(runs))]),
        *course_sections(runs),
        *inside_sections(runs),
        *setting_sections(runs),
    ]
    sections = [section for section in sections if section.parts]
    links = "".join(
        f'<a href="#s{number}">{escape(section.title)}</a>' for number, section in enumerate(sections)
    )
    body = "".join(section.html(number) for number, section in enumerate(sections))
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'{again}<link rel="icon" href="data:,"><title>{escape(names)}: a report by forge</title>'
        f"<style>{STYLE}</style></head><body><header><h1>{escape(names)}</h1>"
        f'<p class="made">Made {utc_now()[:19].replace("T", " ")} UTC from '
        f"{escape(', '.join(str(run.path) for run in runs))}</p>"
        f'<nav aria-label="Sections">{links}</nav></header><main>{body}</main></body></html>\n'
    )
