"""Looks and script of the page of a report: light and dark, from 320 pixels on, readable without the script."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5a6372;--line:#d5dae2;--ground:#fff;--card:#f6f8fa;
--k0:#1f6fb5;--k1:#c8500b;--k2:#1e8449;--k3:#8e44ad;--k4:#b3163b;--k5:#0e7c86;--k6:#7d6608;--k7:#c2408f}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--soft:#9aa5b5;--line:#3a4350;--ground:#12161c;--card:#1b212a;
--k0:#63aef2;--k1:#f59a5b;--k2:#5fcf8d;--k3:#c99be6;--k4:#f47a95;--k5:#4cc9d4;--k6:#d9bd4a;--k7:#f08cc8}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;max-width:90rem;margin:0 auto;padding:1rem;color:var(--ink);
background:var(--ground);overflow-wrap:anywhere}
h1{font-size:1.4rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:1.8rem 0 .6rem}p{margin:.3rem 0}
small,figcaption span,.empty{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1rem}
.card,.chart{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.7rem .9rem;margin:0;
min-width:0}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;padding:.5rem 0;position:sticky;top:0;background:var(--ground);
z-index:2}
.legend label{min-width:0}.key{display:inline-block;width:1.1rem;height:.3rem;border-radius:.15rem;
vertical-align:middle;background:currentColor;margin-right:.3rem}
.c0{color:var(--k0)}.c1{color:var(--k1)}.c2{color:var(--k2)}.c3{color:var(--k3)}.c4{color:var(--k4)}.c5{color:var(--k5)}
.c6{color:var(--k6)}.c7{color:var(--k7)}
.switch{font-size:.8rem;color:var(--soft);display:block;text-align:right}
.log{display:none}.chart:has(.islog:checked) .log{display:inline}.chart:has(.islog:checked) .lin{display:none}
.frame{display:grid;grid-template-columns:4.9rem minmax(0,1fr);padding:.6rem 1.6rem 0 0}
.ys,.xs{position:relative;font-size:.75rem;color:var(--soft)}
.ys span{position:absolute;right:.5rem;transform:translateY(-50%);white-space:nowrap}
.xs{grid-column:2;height:1.5rem}.xs span{position:absolute;transform:translateX(-50%);top:.2rem;white-space:nowrap}
.frame .xs::before{content:"step";position:absolute;right:calc(100% + .5rem);top:.2rem;
white-space:nowrap}
.area{position:relative;height:13rem;touch-action:pan-y}
.area svg{width:100%;height:100%;display:block;overflow:visible;border-left:1px solid var(--line);
border-bottom:1px solid var(--line)}
path{fill:none;vector-effect:non-scaling-stroke;stroke:currentColor}
.grid{stroke:var(--line);stroke-width:1px}.curve{stroke-width:1.5px;stroke-linejoin:round;stroke-linecap:round}
.dashed{stroke-dasharray:5 4;stroke-width:1px}.dots{stroke-width:7px;stroke-linecap:round}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--soft);display:none}
.tip{font-size:.8rem;min-height:1.3rem;margin:.1rem 0 0}.tip b{font-weight:600;margin-right:.8rem}
.track{position:relative;height:2.7rem;margin:0 1.6rem 0 .8rem}
.track::before{content:"";position:absolute;left:0;right:0;top:1.35rem;border-top:1px solid var(--line)}
.track i{position:absolute;top:calc(1.35rem - 1px);height:3px;background:currentColor}.track .below{top:1.4rem}
.track b{position:absolute;transform:translateX(-50%);font-size:.8rem;line-height:1.3rem;width:1rem;text-align:center;
overflow:hidden}
.lanes .xs{margin:0 1.6rem 0 .8rem}
.bar{display:flex;height:1.1rem;background:var(--line);margin:.1rem 0 .5rem;overflow:hidden;border-radius:.15rem}
.bar i{display:block;height:100%}.pair .bar{height:.5rem;margin:0 0 .1rem}
.states{width:100%;height:1.2rem;display:block}.states rect,.bar i.s0,.key.s0{stroke:none}
.keys{display:flex;flex-wrap:wrap;gap:.1rem 1rem;font-size:.85rem}
.s0{--s:#4a90c4}.s1{--s:#d62728}.s2{--s:#ff7f0e}.s3{--s:#9467bd}.s4{--s:#7f7f7f}.s5{--s:#c3c9d2}
rect.s0,rect.s1,rect.s2,rect.s3,rect.s4,rect.s5{fill:var(--s)}i.s0,i.s1,i.s2,i.s3,i.s4,i.s5{background:var(--s)}
dl{display:grid;grid-template-columns:minmax(7rem,auto) minmax(0,1fr);gap:.1rem .8rem;margin:.3rem 0;font-size:.9rem}
dt{color:var(--soft)}dd{margin:0;min-width:0}
ul{margin:.3rem 0;padding-left:1.2rem;font-size:.9rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.8rem;margin:.4rem 0}code{font-size:.9em}
@media(max-width:600px){.xs span:nth-child(even){display:none}}
summary{cursor:pointer}details{margin:.4rem 0}
"""

SCRIPT = """
const say={bytes:v=>{let u=['B','KiB','MiB','GiB','TiB','PiB'],n=0;while(v>=1023.5&&n<5){v/=1024;n++}
return (n?v.toPrecision(v<1000?3:4):v.toFixed(0))+' '+u[n]},
count:v=>v>=1e6?(v/1e6).toPrecision(3)+' M':v>=1e4?(v/1e3).toPrecision(3)+' k':+v.toPrecision(4),
number:v=>+v.toPrecision(5)};
for(const figure of document.querySelectorAll('figure.chart')){
const text=figure.querySelector('script');if(!text)continue;
const data=JSON.parse(text.textContent),area=figure.querySelector('.area'),tip=figure.querySelector('.tip'),
cursor=figure.querySelector('.cursor');
area.addEventListener('pointermove',event=>{
const box=area.getBoundingClientRect(),part=Math.min(1,Math.max(0,(event.clientX-box.left)/box.width)),
step=Math.round(data.first+part*(data.last-data.first));
cursor.style.display='block';cursor.style.left=100*part+'%';
tip.textContent='';const at=document.createElement('b');at.textContent='near step '+step.toLocaleString('en');
tip.append(at);
for(const curve of data.curves){const hidden=document.getElementById('r'+curve.run);
if(hidden&&!hidden.checked||!curve.x.length)continue;
let low=0,high=curve.x.length-1;
while(low<high){const middle=low+high>>1;curve.x[middle]<step?low=middle+1:high=middle}
if(low&&step-curve.x[low-1]<curve.x[low]-step)low--;
const said=document.createElement('b');said.className='c'+curve.run%8;
said.textContent=curve.label+' '+say[data.kind](curve.y[low]);tip.append(said)}});
area.addEventListener('pointerleave',()=>{cursor.style.display='none';tip.textContent=''})}
"""
