"""Colours and type of the HTML report, for light and dark screens and for paper."""

# Eight colours that stay apart for colour-blind readers too (after Okabe and Ito, darkened for white ground).
_JOBS = ("#2468c9", "#d97706", "#0f8a6d", "#b83280", "#6d56c9", "#8a6d00", "#1797b8", "#a8431f")

_RULES = """
:root{--ground:#fff;--text:#1a2230;--dim:#5d6878;--line:#dde2e9;--lane:#f1f3f6;--idle:#dfe4ea;--edge:#b9c2cd;
--ink:#27364b;--soft:#8fa3bd;--faint:#c9d3df;--good:#15803d;--bad:#b42318;--others:#98a2b0;--cut:#101828}
@media(prefers-color-scheme:dark){:root{--ground:#12161d;--text:#e7ebf1;--dim:#98a4b5;--line:#2a323e;--lane:#1a202a;
--idle:#2b333f;--edge:#4a5567;--ink:#d4deeb;--soft:#7187a5;--faint:#414f63;--good:#4ade80;--bad:#f87171;--others:#66717f;
--cut:#0b0f15}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--text);
font:15px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 28px 56px}
h1{font-size:28px;margin:0;letter-spacing:-.01em}header p{margin:2px 0 0;color:var(--dim)}
h2{font-size:18px;margin:0 0 12px}h3{font-size:13px;font-weight:600;color:var(--dim);margin:18px 0 8px}
section{margin-top:40px}p.words,table.words{color:var(--dim);font-size:13.5px;max-width:80ch}
p.words{margin:10px 0 0}section>p{max-width:80ch;color:var(--dim);font-size:13.5px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px;margin-top:24px}
.card{border:1px solid var(--line);border-radius:8px;padding:14px 16px}
.card h3{margin:0}.card b{display:block;font-size:27px;line-height:1.25;letter-spacing:-.02em}
.card span{font-size:12.5px;color:var(--dim)}.card.good{border-color:var(--good)}.card.bad{border-color:var(--bad)}
.card.good b{color:var(--good)}.card.bad b{color:var(--bad)}
svg{display:block;width:100%;height:auto}svg text{fill:var(--text);font-size:13px}
svg .small{font-size:11.5px;fill:var(--dim)}
svg .strong{font-weight:650}.tick{stroke:var(--line);stroke-width:1}.lane{fill:var(--lane)}
.alone{stroke:var(--dim);stroke-dasharray:4 3}code{font-size:12.5px}
.timeline rect{shape-rendering:crispEdges}.full{opacity:1}.kept{opacity:.3}.hatch{fill:url(#hatch)}
.idle{fill:var(--idle)}.startup,.drain{fill:url(#dots)}.unknown{fill:none;stroke:var(--bad);stroke-dasharray:3 2}
.others{fill:var(--others);background:var(--others)}
.ink{fill:var(--ink)}.soft{fill:var(--soft)}.faint{fill:var(--faint)}
rect.good{fill:var(--good)}rect.bad{fill:var(--bad)}
section>.legend{max-width:none}.legend{display:flex;flex-wrap:wrap;gap:6px 18px;margin:0 0 12px;font-size:13px}
.legend span{display:flex;align-items:center}
.key{display:inline-block;width:14px;height:14px;border-radius:3px;margin-right:7px;vertical-align:-2px}
i.solid{background:var(--dim)}i.light{background:var(--dim);opacity:.3}i.idle{background:var(--idle)}
i.dark{background:repeating-linear-gradient(135deg,var(--cut) 0 2px,var(--dim) 2px 5px)}
i.startup{background:radial-gradient(circle at 50% 50%,var(--edge) 1.3px,var(--lane) 1.6px) 0 0/5px 5px}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px}
th{font-size:12.5px;font-weight:600;color:var(--dim);text-align:left}
th,td{padding:7px 12px 7px 0;border-bottom:1px solid var(--line)}
.n{text-align:right;font-variant-numeric:tabular-nums}table.words td{border:0;padding:2px 16px 2px 0}
table.words td:first-child{color:var(--text);width:80px}
@media print{main{padding:0}section{break-inside:avoid}}
"""

STYLE = _RULES.strip() + "".join(f".c{i}{{fill:{c};background:{c}}}" for i, c in enumerate(_JOBS))


def hatch() -> str:
    """The textures that the timelines use."""
    return (
        '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
        '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" style="fill:var(--cut);opacity:.25"/>'
        '<rect width="2.6" height="6" style="fill:var(--cut);opacity:.65"/></pattern>'
        '<pattern id="dots" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<rect width="6" height="6" style="fill:var(--lane)"/>'
        '<circle cx="3" cy="3" r="1.2" style="fill:var(--edge)"/></pattern></defs></svg>'
    )
