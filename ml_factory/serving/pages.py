"""The pages at / and /docs: self-contained, without scripts, styles or fonts of other sites."""

import base64
from hashlib import sha256

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1c2733;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid #dde3ea;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
.ok{color:#1a7f4b}.warn{color:#9a6700}
.abstain,.refuse,.alarm{color:#b42318}small,.quiet{color:#5b6b7b}code,pre{font:13px/1.45 ui-monospace,monospace}
pre{background:#f5f7f9;padding:.6rem;overflow:auto}input{font:inherit}
@media (prefers-color-scheme:dark){body{background:#12181f;color:#e3e9ef}
 th,td{border-color:#2b3641}pre{background:#1b232c}}
"""
_COMMON = """
const part=(name,text,kind)=>{const e=document.createElement(name);if(text!=null)e.textContent=text;
 if(kind)e.className=kind;return e};
const row=(cells,name='td')=>{const r=part('tr');
 for(const c of cells)r.append(c instanceof Node?c:part(name,c));return r};
const table=(heads,rows)=>{const t=part('table');t.append(row(heads,'th'),...rows);return t};
"""
_STATUS = """
const number=p=>part('td',p==null?'—':p.toFixed(4),'n');
const show=(id,...what)=>document.getElementById(id).replaceChildren(...what);
async function refresh(){
 const key=sessionStorage.getItem('key');
 let answer;
 try{answer=await fetch('status',{headers:key?{'X-API-Key':key}:{}})}
 catch(e){show('state',part('span','The service does not answer.','alarm'));return}
 if(answer.status===401){document.getElementById('ask').hidden=false;show('state','A key is needed.');return}
 document.getElementById('ask').hidden=true;
 const s=await answer.json();
 if(!answer.ok){show('state',s.message);return}
 show('state',`${s.streams} open streams, as of ${new Date().toLocaleTimeString()}`);
 show('bundles',table(['symbol','run','bundle'],s.bundles.map(b=>row([b.symbol,b.run_id,b.bundle]))));
 show('guards',...s.guards.flatMap(g=>[part('h3',`${g.symbol}, feed ${g.feed}: ${g.guard}`,g.guard),
  part('p',`${g.bars} bars, the newest ended at ${g.last_bar_end??'—'}. ${g.reason}`),
  table(['check','action','state','onsets','last finding'],Object.entries(g.checks).map(([name,c])=>
   row([name,c.action,part('td',c.state,c.state==='ok'?'ok':'alarm'),c.onsets,c.last])))]));
 show('answers',table(['symbol','known at','short','neutral','long','guard','reason'],s.answers.map(a=>
  row([a.symbol,a.known_at??'—',number(a.p_short),number(a.p_neutral),number(a.p_long),
   part('td',a.guard,a.guard),a.reason]))));
}
document.getElementById('ask').onsubmit=e=>{e.preventDefault();
 sessionStorage.setItem('key',document.getElementById('key').value);refresh()};
refresh();setInterval(refresh,2000);
"""
_DOCS = """
(async()=>{
 const page=await(await fetch('openapi.json')).json(),place=document.getElementById('paths');
 document.getElementById('about').textContent=page.info.description;
 for(const [path,methods] of Object.entries(page.paths))for(const [method,one] of Object.entries(methods)){
  place.append(part('h2',`${method.toUpperCase()} ${path}`),part('p',one.description));
  const body=one.requestBody?.content?.['application/json']?.schema?.['$ref'];
  if(body)place.append(part('p',`Body: ${body.split('/').pop()}`));
  place.append(table(['status','meaning'],Object.entries(one.responses).map(([code,r])=>row([code,r.description]))));
 }
 for(const [path,s] of Object.entries(page['x-websockets']??{})){
  place.append(part('h2',`WebSocket ${path}`),part('p',s.description));
  const names=kinds=>Object.values(kinds).map(k=>k['$ref'].split('/').pop()).join(', ');
  place.append(table(['direction','messages'],[row(['sent',names(s.sent)]),row(['received',names(s.received)])]));
  place.append(table(['close code','meaning'],Object.entries(s.closeCodes).map(one=>row(one))));
 }
 place.append(part('h2','Bodies'));
 for(const [name,schema] of Object.entries(page.components?.schemas??{}))
  place.append(part('h3',name),part('p',schema.description??''),part('pre',JSON.stringify(schema.properties??schema,null,1)));
})();
"""


def _page(title: str, body: str, script: str) -> str:
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body><h1>{title}</h1>{body}'
        f"<script>{_COMMON}{script}</script></body></html>"
    )


def _policy(script: str) -> str:
    """Return the Content-Security-Policy that allows this script and style alone."""
    style, code = (
        "'sha256-" + base64.b64encode(sha256(text.encode()).digest()).decode() + "'"
        for text in (_STYLE, _COMMON + script)
    )
    allowed = f"default-src 'none'; connect-src 'self'; style-src {style}; script-src {code}"
    return allowed + "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


_FORM = '<form id="ask" hidden><label>Key <input id="key" type="password" autocomplete="off"></label></form>'
STATUS_PAGE = _page(
    "ml_factory",
    f'<p id="state" class="quiet" role="status"></p>{_FORM}<h2>Bundles</h2><div id="bundles"></div>'
    '<h2>Guard</h2><div id="guards"></div><h2>Last answers</h2><div id="answers"></div>'
    '<p><small><a href="docs">Requests</a>, <a href="metrics">metrics</a></small></p>',
    _STATUS,
)
DOCS_PAGE = _page("ml_factory: requests", '<p id="about"></p><div id="paths"></div>', _DOCS)
STATUS_POLICY, DOCS_POLICY = _policy(_STATUS), _policy(_DOCS)
