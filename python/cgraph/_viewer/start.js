// Tabs, tools, the panel and the keys; what the page's address says comes first.
const asked = new URLSearchParams(location.hash.slice(1));
const wantsDark = matchMedia("(prefers-color-scheme: dark)");
const stage = new Stage(at("stage"));
const views = [];
if (data.graph) views.push(new GraphView(data.graph));
if (data.memory) views.push(new MemoryView(data.memory));
let view, found = [], turn = -1;

function paint(theme) {
  root.dataset.theme = theme;
  readColours();
  stage.redraw();
}

function choose(i, goes = false) {
  view.selected = i;
  root.dataset.selected = i ?? "";
  const panel = at("panel");
  panel.hidden = i === undefined;
  if (i !== undefined && goes) view.reveal(i);
  if (i !== undefined) {
    const { title, facts } = view.describe(i);
    const entry = ([name, said]) => [make("dt", { textContent: name }), told(said)];
    const list = make("dl", {}, ...facts.flatMap(entry));
    const close = make("button", { className: "close", textContent: "✕", title: "Close (Esc)" });
    close.onclick = () => choose(undefined);
    panel.replaceChildren(close, make("h2", { textContent: title }), list);
    panel.scrollTop = 0;
  }
  stage.redraw();
}

function told(said) {
  if (typeof said === "string") {
    return make("dd", { textContent: said, className: /[\n_:]|0x/.test(said) ? "code" : "" });
  }
  const link = ([textContent, one]) =>
    make("button", { textContent, onclick: () => choose(one, true) });
  const shown = said.slice(0, 40).map(link);
  return make("dd", {}, ...shown, said.length > 40 ? ` and ${said.length - 40} more` : "");
}

function search(text) {
  found = view.search(text.trim().toLowerCase());
  turn = -1;
  const count = found.length === 1 ? "1 hit" : `${found.length} hits`;
  at("hits").textContent = text.trim() ? count : "";
  root.dataset.hits = text.trim() ? found.length : "";
  stage.redraw();
}

function showLegend() {
  const entry = ({ name, glyph, colour, count, isOn, press }) => {
    const key = make("i", { textContent: glyph });
    key.style.background = colour;
    key.style.color = letterColour(colour);
    const times = make("span", { className: "count", textContent: count });
    const button = make("button", { title: `Show ${name} only` }, key, name, times);
    button.setAttribute("aria-pressed", isOn);
    button.onclick = () => { press(); showLegend(); stage.redraw(); };
    return make("li", {}, button);
  };
  at("legend").replaceChildren(...view.legend().map(entry));
}

function open(next) {
  [view, stage.view] = [next, null];
  at("about").textContent = view.about;
  at("keys").textContent = view.keys;
  at("scaled").hidden = view.measures.length < 2;
  at("chooses").textContent = view.chooses;
  at("folding").hidden = !view.openAll || view.groups().length < 2;
  at("stage").setAttribute("aria-label", `${view.name}: ${view.about}`);
  const option = (textContent, value) => make("option", { textContent, value });
  at("measure").replaceChildren(...view.measures.map(option));
  at("measure").value = view.measure;
  for (const tab of at("tabs").children) {
    tab.setAttribute("aria-selected", tab.textContent === view.name);
  }
  showLegend();
  search(at("search").value);
  choose(view.selected);
  // The legend may have changed the room.
  stage.resize();
  stage.view = view;
  stage.fit();
}

function key(event) {
  const isTyping = event.target === at("search");
  if (event.key === "Escape") {
    if (isTyping) at("search").value = "", search(""), at("stage").focus();
    else choose(undefined);
  } else if (isTyping && event.key === "Enter" && found.length) {
    turn = (turn + (event.shiftKey ? found.length - 1 : 1)) % found.length;
    choose(found[turn], true);
    at("hits").textContent = `${turn + 1} of ${found.length}`;
  } else if (!isTyping && !event.ctrlKey && !event.metaKey) {
    const does = {
      "/": () => at("search").focus(),
      "+": () => stage.zoom(1.25),
      "-": () => stage.zoom(0.8),
      0: () => stage.fit(),
    };
    if (event.key.startsWith("Arrow") && event.target === at("stage")) view.step(event.key);
    else if (does[event.key]) does[event.key]();
    else return;
    event.preventDefault();
  }
}

function start() {
  paint(asked.get("theme") || (wantsDark.matches ? "dark" : "light"));
  wantsDark.onchange = () => paint(wantsDark.matches ? "dark" : "light");
  at("title").textContent = data.title;
  at("tabs").replaceChildren(...views.map((one) => {
    const tab = make("button", { textContent: one.name, onclick: () => open(one) });
    tab.setAttribute("role", "tab");
    return tab;
  }));
  at("tabs").hidden = views.length < 2;
  at("search").oninput = () => search(at("search").value);
  at("measure").onchange = () => {
    view.measure = Number(at("measure").value);
    showLegend();
    stage.redraw();
  };
  at("in").onclick = () => stage.zoom(1.25);
  at("out").onclick = () => stage.zoom(0.8);
  at("fit").onclick = () => stage.fit();
  at("open").onclick = () => view.openAll(true);
  at("close").onclick = () => view.openAll(false);
  at("theme").onclick = () => paint(root.dataset.theme === "dark" ? "light" : "dark");
  addEventListener("keydown", key);
  at("search").value = asked.get("search") || "";
  open(views.find((one) => one.name.toLowerCase() === asked.get("tab")) || views[0]);
  const measure = view.measures.indexOf(asked.get("measure"));
  if (measure > 0) at("measure").value = view.measure = measure, showLegend();
  const chosen = Number(asked.get("node") ?? asked.get("block") ?? NaN);
  if (chosen >= 0 && chosen < view.size) choose(chosen, true);
  stage.draw();
  root.dataset.ready = views.map((one) => `${one.label}:${one.size}`).join(" ");
}

start();
root.dataset.milliseconds = Math.round(performance.now());
