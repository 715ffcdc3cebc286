// The view of a graph: nodes in nested groups, in columns, with branches side by side.
const ROW = 24, WIDTH = 220, GAP = 7, PAD = 8, HEAD = 24, BESIDE = 16, COLUMN = 30;

class GraphView {
  constructor(given) {
    Object.assign(this, given);
    this.name = given.tab;
    this.label = `${given.noun}s`;
    this.keys = "Click: details. Arrows: next, open, close. /: search.";
    this.chooses = "Width by";
    this.measure = 0;
    this.hits = new Set();
    this.size = this.nodes.length;
    this.nodes.forEach((node) => {
      [node.title, node.note] = [this.texts[node.t], this.texts[node.n]];
      node.behind = [];
      node.facts = [];
      for (let i = 0; i < node.x.length; i += 2) {
        node.facts.push([this.texts[node.x[i]], this.texts[node.x[i + 1]]]);
      }
      const searched = ["operator", "kernel", "module", "source", "labels", "function"];
      const said = node.facts.filter(([name]) => searched.includes(name)).map(([, text]) => text);
      node.sought = [node.title, ...said].join("\n").toLowerCase();
    });
    this.nodes.forEach((node, i) => node.d.forEach((before) => this.nodes[before].behind.push(i)));
    this.most = this.measures.map((_, i) => this.nodes.reduce((most, n) => Math.max(most, n.m[i - 1] || 0), 1));
    this.prepare(this.root, null);
    this.root.isOpen = true;
    this.closeDeep();
  }

  // Give each group its nodes, its parent and its state; modules are open, equal layers folded.
  prepare(item, up) {
    item.up = up;
    item.isOpen = !item.r;
    item.all = [];
    for (const part of item.i || item.r) {
      if (typeof part === "number") {
        this.nodes[part].up = item;
        item.all.push(part);
      } else {
        this.prepare(part, item);
        for (const one of part.all) item.all.push(one);
      }
    }
  }

  groups(item = this.root, depth = 0) {
    const inner = (item.i || item.r).filter((part) => typeof part !== "number");
    return [[item, depth], ...inner.flatMap((part) => this.groups(part, depth + 1))];
  }

  // Close the deepest modules of a large graph, so that its first picture can be read.
  closeDeep() {
    const groups = this.groups();
    for (let depth = groups.reduce((most, [, d]) => Math.max(most, d), 0); depth > 1; depth--) {
      this.arrange(800);
      if (this.boxes.length <= 500) return;
      for (const [item, d] of groups) if (d === depth && item.i) item.isOpen = false;
    }
  }

  openAll(isOpen) {
    for (const [item] of this.groups()) if (item.up) item.isOpen = isOpen && !item.isRow;
    stage.fit();
  }

  // Take the height of columns with which the whole picture is largest.
  fit(stage) {
    let best = { scale: 0 };
    const tried = (limit) => {
      const { w, h } = this.arrange(limit);
      const scale = Math.min((stage.width - 32) / w, (stage.height - 36) / h);
      if (scale > best.scale) best = { limit, scale, w, h };
    };
    for (let limit = 240; limit < 60000; limit *= 1.2) tried(limit);
    for (let near = 0.86, { limit } = best; near < 1.18; near += 0.02) tried(limit * near);
    this.arrange(best.limit);
    stage.kx = stage.ky = Math.min(best.scale, 1.35);
    stage.x = Math.max((stage.width - best.w * stage.kx) / 2, 16);
    stage.y = 16;
  }

  // Find the places of all visible boxes; no column is higher than the limit where that can be.
  arrange(limit) {
    this.limit = limit;
    this.boxes = [];
    this.boxOf = new Array(this.nodes.length);
    const whole = this.laidOut(this.root.i, this.root, limit);
    this.put(whole, 0, 0);
    return whole;
  }

  sized(item, limit) {
    if (typeof item === "number") return { kind: "node", item, w: WIDTH, h: ROW };
    // A module of one node needs no frame.
    if (this.noun === "node" && item.i?.length === 1 && typeof item.i[0] === "number") {
      return { kind: "node", item: item.i[0], prefix: item.n, w: WIDTH, h: ROW };
    }
    const isFold = Boolean(item.r) && !item.isOpen;
    const inside = isFold ? item.r[0].i : item.i || item.r;
    item.isRow = isFold && inside.length === 1 && typeof inside[0] === "number";
    if (item.isRow || (!isFold && !item.isOpen)) {
      return { kind: item.isRow ? "row" : "closed", item, w: WIDTH, h: ROW };
    }
    const owner = isFold ? item.r[0] : item;
    const laid = this.laidOut(inside, owner, Math.max(limit - HEAD - PAD, 4 * ROW));
    const w = Math.max(laid.w + 2 * PAD, WIDTH);
    return { kind: isFold ? "fold" : "group", item, laid, w, h: laid.h + HEAD + PAD };
  }

  laidOut(items, owner, limit) {
    const tails = new Map(), parts = [], widths = [];
    let h = 0;
    const later = (a, b) => (a.column > b.column || (a.column === b.column && a.y > b.y) ? a : b);
    items.forEach((item, place) => {
      const part = this.sized(item, limit);
      part.lane = typeof item === "number" ? this.nodes[item].l : item.l;
      let start = tails.get(part.lane) || { column: 0, y: 0 };
      for (const before of owner.a?.[place] || []) start = later(start, parts[before].end);
      if (start.y > 0 && start.y + part.h > limit) start = { column: start.column + 1, y: 0 };
      Object.assign(part, start, { end: { column: start.column, y: start.y + part.h + GAP } });
      tails.set(part.lane, part.end);
      parts.push(part);
      if (!widths[part.column]) widths[part.column] = new Map();
      const lanes = widths[part.column];
      lanes.set(part.lane, Math.max(lanes.get(part.lane) || 0, part.w));
      h = Math.max(h, start.y + part.h);
    });
    let x = 0;
    for (const lanes of widths) {
      for (const lane of [...lanes.keys()].sort((a, b) => a - b)) {
        const w = lanes.get(lane);
        lanes.set(lane, { x, w });
        x += w + BESIDE;
      }
      x += COLUMN - BESIDE;
    }
    for (const part of parts) Object.assign(part, widths[part.column].get(part.lane));
    const isStrip = widths.length === 1 && widths[0].size === 1;
    return { parts, isStrip, w: Math.max(x - COLUMN, WIDTH), h: Math.max(h, ROW) };
  }

  put(laid, x, y, up = null) {
    for (const part of laid.parts) {
      const box = { ...part, x: x + part.x, y: y + part.y, up, depth: up ? up.depth + 1 : 0 };
      box.all = box.kind === "node" ? [box.item] : box.item.all;
      this.boxes.push(box);
      for (const one of box.all) this.boxOf[one] = box;
      if (!part.laid) continue;
      const w = box.w - 2 * PAD;
      if (part.laid.isStrip) for (const inner of part.laid.parts) inner.w = w;
      this.put(part.laid, box.x + PAD, box.y + HEAD, box);
    }
  }

  draw(pen, stage) {
    pen.translate(stage.x, stage.y);
    pen.scale(stage.kx, stage.ky);
    const [left, top] = [-stage.x / stage.kx, -stage.y / stage.ky];
    const [right, bottom] = [left + stage.width / stage.kx, top + stage.height / stage.ky];
    const isSeen = (b) => b.x < right && b.y < bottom && b.x + b.w > left && b.y + b.h > top;
    const seen = this.boxes.filter(isSeen);
    const isLegible = stage.ky > 0.42;
    for (const box of seen) if (box.laid) this.drawGroup(pen, box, isLegible);
    this.drawEdges(pen, isSeen);
    for (const box of seen) if (!box.laid) this.drawRow(pen, box, isLegible);
  }

  isDim({ all }) {
    if (all.includes(this.selected)) return false;
    if (this.hits.size) return !all.some((one) => this.hits.has(one));
    return this.family !== undefined && !all.some((one) => this.nodes[one].f === this.family);
  }

  drawGroup(pen, box, isLegible) {
    const isFold = box.kind === "fold";
    pen.lineWidth = 1;
    for (const shift of isFold ? [6, 3, 0] : [0]) {
      rounded(pen, box.x + shift, box.y + shift, box.w, box.h, 7);
      pen.fillStyle = box.depth % 2 ? ink.group2 : ink.group;
      pen.strokeStyle = isFold ? ink.edge : ink.rule;
      pen.fill();
      pen.stroke();
    }
    if (!isLegible) return;
    pen.font = `600 12px ${SANS}`;
    pen.fillStyle = ink.ink;
    const count = box.item.r ? `×${box.item.r.length}` : `${box.item.all.length}`;
    const name = `${isFold ? "▸" : "▾"} ${box.item.n}`;
    pen.fillText(fitted(pen, name, box.w - 30 - widthOf(pen, count)), box.x + 9, box.y + 16);
    if (!isFold && !box.item.r) [pen.font, pen.fillStyle] = [`11px ${SANS}`, ink.faint];
    pen.fillText(count, box.x + box.w - 9 - widthOf(pen, count), box.y + 16);
  }

  drawRow(pen, box, isLegible) {
    const isClosed = box.kind === "closed", { all } = box;
    const node = this.nodes[all[0]];
    const isSelected = this.selected !== undefined && this.boxOf[this.selected] === box;
    pen.globalAlpha = this.isDim(box) ? 0.22 : 1;
    rounded(pen, box.x, box.y, box.w, box.h, 5);
    pen.fillStyle = ink.card;
    pen.fill();
    const isHit = this.hits.size > 0 && !this.isDim(box);
    pen.lineWidth = isSelected ? 3 : isHit ? 2.2 : 1;
    pen.strokeStyle = isSelected ? ink.accent : isHit ? ink.hit : isClosed ? ink.edge : ink.rule;
    pen.stroke();
    const sum = all.reduce((total, one) => total + (this.nodes[one].m[this.measure - 1] || 0), 0);
    const share = this.measure && !isClosed ? sum / all.length / this.most[this.measure] : 1;
    if (isClosed) this.drawParts(pen, box, all);
    else {
      const colour = this.families[node.f][2];
      pen.save();
      pen.clip();
      pen.fillStyle = colour;
      pen.fillRect(box.x, box.y, 6, box.h);
      // Small boxes have no text that a strong colour would hide.
      pen.globalAlpha *= isLegible ? 0.24 : 0.6;
      pen.fillRect(box.x + 6, box.y, Math.max((box.w - 6) * share, share ? 2 : 0), box.h);
      pen.restore();
    }
    if (isLegible) this.writeRow(pen, box, node, all, sum, isClosed);
    pen.globalAlpha = 1;
  }

  // The families of a closed group, as a strip at its lower edge.
  drawParts(pen, box, all) {
    const counts = this.families.map((_, f) => all.filter((one) => this.nodes[one].f === f).length);
    let x = box.x + 5;
    counts.forEach((count, f) => {
      const wide = ((box.w - 10) * count) / all.length;
      pen.fillStyle = this.families[f][2];
      pen.fillRect(x, box.y + box.h - 4, wide, 3);
      x += wide;
    });
  }

  writeRow(pen, box, node, all, sum, isClosed) {
    const middle = box.y + 16;
    let right = "";
    if (this.measure) {
      const name = this.measures[this.measure];
      const words = { bytes: units, seconds: (s) => `${(s * 1e6).toPrecision(3)} µs` };
      right = sum ? (words[name] || ((n) => n.toLocaleString("en")))(sum) : "";
    } else if (isClosed) right = `${all.length}`;
    else if (box.kind === "node") right = node.note;
    const title = box.prefix ? `${box.prefix} · ${node.title}` : node.title;
    pen.font = `12.5px ${SANS}`;
    const room = box.w - 52 - widthOf(pen, title);
    pen.font = `11px ${SANS}`;
    // A line of source gives way to a name; a number does not.
    if (box.kind === "node" && !this.measure && widthOf(pen, right) > room) right = "";
    pen.fillStyle = ink.faint;
    pen.fillText(right, box.x + box.w - 8 - widthOf(pen, right), middle);
    const rest = box.w - 38 - (right ? widthOf(pen, right) + 8 : 0);
    pen.fillStyle = ink.ink;
    pen.font = `600 12px ${SANS}`;
    pen.fillText(isClosed ? "▸" : this.families[node.f][1], box.x + 11, middle);
    pen.font = `${isClosed ? 600 : 400} 12.5px ${SANS}`;
    const many = box.item.r ? ` ×${box.item.r.length}` : "";
    const name = isClosed ? box.item.n : title;
    pen.fillText(fitted(pen, name + many, rest), box.x + 27, middle);
  }

  drawEdges(pen, isSeen) {
    const done = new Map(), chosen = [];
    pen.lineWidth = 1.1;
    pen.strokeStyle = ink.edge;
    pen.beginPath();
    this.nodes.forEach((node, i) => {
      for (const before of node.d) {
        const [from, to] = this.siblings(this.boxOf[before], this.boxOf[i]);
        if (!from || (!isSeen(from) && !isSeen(to))) continue;
        if (before === this.selected || i === this.selected) chosen.push([from, to]);
        if (!done.has(from)) done.set(from, new Set());
        if (done.get(from).has(to)) continue;
        done.get(from).add(to);
        this.trace(pen, from, to);
      }
    });
    pen.stroke();
    pen.beginPath();
    pen.lineWidth = 2.6;
    pen.strokeStyle = ink.accent;
    for (const [from, to] of chosen) this.trace(pen, from, to);
    pen.stroke();
  }

  // The boxes beside each other in which two boxes are; nothing if one is in the other.
  siblings(a, b) {
    while (a.depth > b.depth) a = a.up;
    while (b.depth > a.depth) b = b.up;
    if (a === b) return [];
    while (a.up !== b.up) [a, b] = [a.up, b.up];
    return [a, b];
  }

  trace(pen, from, to) {
    if (to.y >= from.y + from.h - 1 && Math.abs(to.x - from.x) < 2) {
      pen.moveTo(to.x + 18, from.y + from.h);
      pen.lineTo(to.x + 18, to.y);
      return;
    }
    const goesRight = to.x > from.x + from.w - 1;
    if (to.y >= from.y + from.h) {
      // Along the side on which no box is: behind a fork that of its branch, else that of its end.
      const [x, end, y] = [from.x + 18, to.x + 18, from.y + from.h];
      const turn = (goesRight ? y : to.y) + (goesRight ? GAP / 2 : -GAP / 2);
      pen.moveTo(x, y);
      pen.arcTo(x, turn, end, turn, 3.5);
      pen.arcTo(end, turn, end, to.y, 3.5);
      pen.lineTo(end, to.y);
    } else if (goesRight) {
      // To a later column: through the gutter before it.
      const gutter = to.x - COLUMN / 2, end = to.y + ROW / 2;
      const isNext = to.x - from.x - from.w < COLUMN + 4;
      const y = isNext ? from.y + from.h - ROW / 2 : from.y + from.h + GAP / 2;
      if (isNext) pen.moveTo(from.x + from.w, y);
      else pen.moveTo(from.x + 18, from.y + from.h), pen.arcTo(from.x + 18, y, gutter, y, 3.5);
      pen.arcTo(gutter, y, gutter, end, 6);
      pen.arcTo(gutter, end, to.x, end, 6);
      pen.lineTo(to.x, end);
    } else {
      const y = from.y + from.h - ROW / 2;
      pen.moveTo(from.x, y);
      pen.bezierCurveTo(from.x - 40, y, to.x - 40, to.y + ROW / 2, to.x, to.y + ROW / 2);
    }
  }

  click(x, y) {
    const [wx, wy] = [(x - stage.x) / stage.kx, (y - stage.y) / stage.ky];
    const isAt = (b) => wx >= b.x && wy >= b.y && wx <= b.x + b.w && wy <= b.y + b.h;
    const box = this.boxes[lastPlace(this.boxes, isAt)];
    if (!box) choose(undefined);
    else if (box.kind === "node") choose(box.item);
    else if (box.kind === "closed" || box.kind === "row" || wy < box.y + HEAD) this.toggle(box);
  }

  toggle(box) {
    box.item.isOpen = !box.item.isOpen;
    const before = [box.x, box.y];
    this.arrange(this.limit);
    const now = this.boxes.find((one) => one.item === box.item);
    // What was clicked stays where it is.
    stage.x += (before[0] - now.x) * stage.kx;
    stage.y += (before[1] - now.y) * stage.ky;
    stage.isFitted = false;
    stage.redraw();
  }

  step(key) {
    const up = this.selected !== undefined && this.boxOf[this.selected].up;
    if (key === "ArrowLeft" && up) {
      choose(undefined);
      this.toggle(up);
    } else {
      const next = neighbour(this.selected, key);
      if (this.nodes[next]) choose(next, true);
    }
  }

  // Open what hides a node, and bring it into sight.
  reveal(i) {
    let inner = i;
    for (let item = this.nodes[i].up; item; [inner, item] = [item, item.up]) {
      if (item.i) item.isOpen = true;
      else if (item.r[0] !== inner || item.r[0].i.length === 1) item.isOpen = true;
    }
    this.arrange(this.limit);
    const box = this.boxOf[i];
    const isSmall = stage.ky < 0.5;
    if (isSmall) stage.kx = stage.ky = 1;
    const [x, y] = [box.x * stage.kx + stage.x, box.y * stage.ky + stage.y];
    const [w, h] = [box.w * stage.kx, ROW * stage.ky];
    if (isSmall || x < 0 || y < 0 || x + w > stage.free || y + h > stage.height) {
      stage.x += (stage.free - w) / 2 - x;
      stage.y += (stage.height - h) / 2 - y;
      stage.isFitted = false;
    }
  }

  search(text) {
    const found = placesOf(this.nodes, text);
    this.hits = new Set(found);
    return found;
  }

  describe(i) {
    const node = this.nodes[i];
    const links = (all) => all.map((one) => [`${one}: ${this.nodes[one].title}`, one]);
    const facts = [...node.facts.map(([name, text]) => [name, text])];
    if (node.d.length) facts.push(["after", links(node.d)]);
    if (node.behind.length) facts.push(["before", links(node.behind)]);
    facts.push(["lane", `${node.l}`], ["family", this.families[node.f][0]]);
    return { title: `${i}: ${node.title}`, facts };
  }

  legend() {
    return this.families.map(([name, glyph, colour, count], f) => ({
      name, glyph, colour, count, isOn: this.family === f,
      press: () => { this.family = this.family === f ? undefined : f; },
    }));
  }
}
