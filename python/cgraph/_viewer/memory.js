// The view of a pool's memory: blocks over the events, and the bytes in use below them.
const LEFT = 96, RIGHT = 24, CHART = 132, MARKS = 26, CUT = 20, TITLE = 22, FOOT = 34;
const KINDS = [
  ["temporary", "T", "#56b4e9"], ["held at the end", "H", "#e69f00"],
  ["there before", "B", "#999999"],
];

class MemoryView {
  constructor(given) {
    Object.assign(this, given);
    this.name = "Memory";
    this.label = "blocks";
    this.keys = "Click: details. Shift or Alt and wheel: zoom one way. /: search.";
    this.hasTwoScales = true;
    this.chooses = "Colour by";
    this.measure = 0;
    // A block whose operator is not known keeps the colour of its fate.
    this.measures = this.families.length ? ["lifetime", "operator"] : ["lifetime"];
    this.hits = new Set();
    this.size = this.blocks.length;
    this.steps = this.inUse.length;
    this.blocks.forEach((block) => {
      block.kinds = [KINDS.find(([name]) => name === block.k), this.families[block.f]];
      block.sought = block.x.map(([, text]) => text).join("\n").toLowerCase();
    });
  }

  // Heights are proportional to bytes; cut ranges have the height of their mark.
  fit(stage) {
    this.plot = { w: stage.width - LEFT - RIGHT, h: stage.height - CHART - MARKS - FOOT };
    let cuts = 0, used = 0;
    for (const { cut, ranges } of this.segments) {
      cuts += cut > 0;
      for (const range of ranges) [used, cuts] = [used + range[1], cuts + (range[2] > 0)];
    }
    const room = this.plot.h - cuts * CUT - this.segments.length * TITLE;
    this.perByte = Math.max(room, 120) / Math.max(used, 1);
    let y = 0;
    this.places = [];
    this.bands = [];
    for (const segment of [...this.segments].reverse()) {
      const band = { segment, y, cuts: [] };
      y += TITLE;
      for (const [start, bytes, cut] of [...segment.ranges].reverse()) {
        if (cut > 0) band.cuts.push([y, cut]), y += CUT;
        this.places.push({ start, bytes, y });
        y += bytes * this.perByte;
      }
      if (segment.cut > 0) band.cuts.push([y, segment.cut]), y += CUT;
      this.bands.push({ ...band, h: y - band.y });
    }
    [stage.x, stage.y, stage.kx] = [LEFT, MARKS, this.plot.w / this.steps];
    stage.ky = Math.min(1, this.plot.h / Math.max(y, 1));
    this.blocks.forEach((block) => {
      const [address, bytes, begin, end] = block.p;
      const isIn = ({ start, bytes }) => address >= start && address < start + bytes;
      const place = this.places.find(isIn);
      if (!place) return;
      const y = place.y + (place.start + place.bytes - address - bytes) * this.perByte;
      block.box = [begin, y, end - begin, bytes * this.perByte];
    });
  }

  kindOf(block) {
    return block.kinds[this.measure] || block.kinds[0];
  }

  onScreen([x, y, w, h]) {
    const wide = Math.max(w * stage.kx, 1);
    return [x * stage.kx + stage.x, y * stage.ky + stage.y, wide, Math.max(h * stage.ky, 1)];
  }

  draw(pen, stage) {
    const bottom = stage.height - CHART - FOOT;
    pen.save();
    pen.beginPath();
    pen.rect(0, MARKS, stage.width, bottom - MARKS);
    pen.clip();
    this.drawBands(pen, stage);
    pen.beginPath();
    pen.rect(LEFT, MARKS, stage.width, bottom - MARKS);
    pen.clip();
    this.blocks.forEach((block, i) => block.box && this.drawBlock(pen, block, i, stage, bottom));
    pen.restore();
    this.drawChart(pen, stage, bottom + 14);
    this.drawMarks(pen, stage, bottom);
  }

  drawBands(pen, stage) {
    for (const { segment, y, h, cuts } of this.bands) {
      const [x, top, wide, high] = this.onScreen([0, y, this.steps, h]);
      pen.fillStyle = ink.group;
      pen.fillRect(x, top, wide, high - 3);
      pen.font = `600 11.5px ${SANS}`;
      pen.fillStyle = ink.faint;
      pen.fillText(segment.name, Math.max(x, LEFT) + 6, top + 15);
      for (const [at, cut] of cuts) {
        this.drawCut(pen, stage, this.onScreen([0, at, this.steps, CUT]), cut);
      }
    }
    pen.font = `11px ${SANS}`;
    pen.fillStyle = ink.faint;
    pen.textAlign = "right";
    for (const { start, bytes, y } of this.places) {
      const [, top, , high] = this.onScreen([0, y, 1, bytes * this.perByte]);
      if (high > 12) pen.fillText(units(bytes), LEFT - 8, top + high / 2 + 4);
      if (high > 40) pen.fillText(`+0x${start.toString(16)}`, LEFT - 8, top + high - 2);
    }
    pen.textAlign = "left";
  }

  // A torn edge: what is between the two lines is not drawn.
  drawCut(pen, stage, [x, y, wide, high], cut) {
    const [from, to] = [Math.max(x, LEFT), Math.min(x + wide, stage.width)];
    pen.fillStyle = ink.ground;
    pen.strokeStyle = ink.edge;
    pen.lineWidth = 1;
    pen.fillRect(from, y + 4, to - from, high - 8);
    for (const edge of [y + 4, y + high - 4]) {
      pen.beginPath();
      for (let i = 0; from + 6 * i <= to; i++) pen.lineTo(from + 6 * i, edge + 5 * (i % 2) - 2.5);
      pen.stroke();
    }
    pen.font = `10.5px ${SANS}`;
    pen.fillStyle = ink.faint;
    const text = `${units(cut)} unused, cut out`;
    const middle = (from + to) / 2 - widthOf(pen, text) / 2;
    pen.fillStyle = ink.ground;
    pen.fillRect(middle - 8, y, widthOf(pen, text) + 16, high);
    pen.fillStyle = ink.faint;
    pen.fillText(text, middle, y + high / 2 + 4);
  }

  drawBlock(pen, block, i, stage, bottom) {
    const [x, y, w, h] = this.onScreen(block.box);
    if (x > stage.width || x + w < LEFT || y > bottom || y + h < 0) return;
    const [kind, letter, colour] = this.kindOf(block);
    const isDim = this.hits.size ? !this.hits.has(i) : this.kind && this.kind !== kind;
    pen.globalAlpha = (isDim ? 0.16 : 1) * (i % 2 ? 0.72 : 0.92);
    pen.fillStyle = colour;
    pen.fillRect(x, y, w, h);
    pen.globalAlpha = isDim ? 0.2 : 1;
    if (block.k === "held at the end" && w > 10) pen.fillRect(x + w - 5, y, 5, h);
    if (w > 4 && h > 4) {
      pen.lineWidth = 1;
      pen.strokeStyle = ink.ground;
      pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    }
    if (this.selected === i || this.hits.has(i)) {
      pen.lineWidth = this.selected === i ? 3 : 1.8;
      pen.strokeStyle = this.selected === i ? ink.accent : ink.hit;
      pen.strokeRect(x, y, w, h);
    }
    if (h > 13 && w > 16) {
      const from = Math.max(x, LEFT) + 5, room = Math.min(x + w, stage.width) - from - 6;
      pen.fillStyle = letterColour(colour);
      pen.font = `11px ${SANS}`;
      const [name, line] = block.n.split("\n");
      const parts = [letter, name, units(block.p[1]), line].filter(Boolean);
      // The longest text that fits.
      const texts = parts.map((_, i) => parts.slice(0, parts.length - i).join("  "));
      const fits = texts.find((text) => widthOf(pen, text) <= room) || "";
      pen.fillText(fits, from, Math.max(y, MARKS) + Math.min(14, h / 2 + 4));
    }
    pen.globalAlpha = 1;
  }

  drawChart(pen, stage, top) {
    const high = CHART - 26, base = top + CHART - 14, peak = Math.max(this.peak[0], 1);
    const x = (step) => step * stage.kx + stage.x, y = (count) => base - (count / peak) * high;
    pen.save();
    pen.beginPath();
    pen.rect(LEFT - 4, top - 16, stage.width - LEFT, CHART + FOOT);
    pen.clip();
    pen.beginPath();
    pen.moveTo(x(0), base);
    this.inUse.forEach((count, step) => {
      pen.lineTo(x(step), y(count));
      pen.lineTo(x(step + 1), y(count));
    });
    pen.strokeStyle = pen.fillStyle = "#56b4e9";
    pen.lineWidth = 1.6;
    pen.stroke();
    pen.lineTo(x(this.steps), base);
    pen.globalAlpha = 0.22;
    pen.fill();
    pen.globalAlpha = 1;
    this.drawTicks(pen, stage, base, x);
    pen.strokeStyle = pen.fillStyle = "#d55e00";
    pen.setLineDash([5, 4]);
    pen.beginPath();
    pen.moveTo(LEFT, y(peak));
    pen.lineTo(stage.width - RIGHT, y(peak));
    pen.stroke();
    pen.setLineDash([]);
    pen.beginPath();
    pen.arc(x(this.peak[1] + 0.5), y(peak), 4, 0, 7);
    pen.fill();
    const when = this.peak[1] ? `after event ${this.peak[1] - 1}` : "before event 0";
    const text = `peak ${units(this.peak[0])} ${when}`;
    pen.font = `600 12px ${SANS}`;
    pen.fillStyle = ink.ink;
    const goesLeft = x(this.peak[1]) > stage.width / 2;
    const beside = goesLeft ? -10 - widthOf(pen, text) : 10;
    pen.fillText(text, x(this.peak[1] + 0.5) + beside, y(peak) - 6);
    pen.restore();
    pen.font = `11px ${SANS}`;
    pen.fillStyle = ink.faint;
    pen.textAlign = "right";
    pen.fillText(units(this.peak[0]), LEFT - 8, y(peak) + 4);
    pen.fillText("in use", LEFT - 8, (y(peak) + base) / 2 + 4);
    pen.fillText("0", LEFT - 8, base + 4);
    pen.textAlign = "left";
  }

  drawTicks(pen, stage, base, x) {
    pen.strokeStyle = ink.edge;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(LEFT, base);
    pen.lineTo(stage.width - RIGHT, base);
    pen.stroke();
    let every = 1;
    for (let i = 0; every * stage.kx < 70; i++) every *= i % 3 === 1 ? 2.5 : 2;
    pen.fillStyle = ink.faint;
    pen.font = `11px ${SANS}`;
    for (let event = 0; event < this.steps - 1; event += every) {
      pen.fillText(`${event}`, x(event + 1) - 3, base + 15);
    }
    const words = "events of the allocator, in their order";
    pen.fillText(words, LEFT + (stage.width - LEFT - RIGHT - widthOf(pen, words)) / 2, base + 31);
  }

  drawMarks(pen, stage, bottom) {
    let free = LEFT;
    pen.font = `11px ${SANS}`;
    for (const [index, text] of this.marks) {
      const x = (index + 0.5) * stage.kx + stage.x;
      if (x < LEFT || x > stage.width) continue;
      pen.strokeStyle = ink.faint;
      pen.lineWidth = 1;
      pen.setLineDash([3, 3]);
      pen.beginPath();
      pen.moveTo(x, 8);
      pen.lineTo(x, bottom);
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = ink.faint;
      if (x < free) continue;
      pen.fillText(`capture at ${text}`, x + 5, 18);
      free = x + widthOf(pen, `capture at ${text}`) + 14;
    }
  }

  click(x, y) {
    const isAt = (block) => {
      if (!block.box) return false;
      const [bx, by, w, h] = this.onScreen(block.box);
      return x >= bx && y >= by && x <= bx + w && y <= by + Math.max(h, 3);
    };
    const inMap = y > MARKS && y < stage.height - CHART - FOOT;
    const found = inMap ? lastPlace(this.blocks, isAt) : -1;
    choose(found < 0 ? undefined : found);
  }

  step(key) {
    const next = neighbour(this.selected, key);
    if (this.blocks[next]) choose(next, true);
  }

  reveal(i) {
    const [x, y, w, h] = this.onScreen(this.blocks[i].box || [0, 0, 1, 1]);
    const [dx, dy] = [
      x > stage.free || x + w < LEFT ? stage.free / 2 - x - w / 2 : 0,
      y > stage.height - CHART - FOOT || y + h < MARKS ? this.plot.h / 2 - y - h / 2 : 0,
    ];
    if (dx || dy) [stage.x, stage.y, stage.isFitted] = [stage.x + dx, stage.y + dy, false];
  }

  search(text) {
    const found = placesOf(this.blocks, text);
    this.hits = new Set(found);
    return found;
  }

  describe(i) {
    const block = this.blocks[i];
    return { title: `block ${i}: ${units(block.p[1])}`, facts: block.x };
  }

  legend() {
    const kinds = new Set(this.blocks.map((block) => this.kindOf(block)));
    return [...KINDS, ...this.families].filter((kind) => kinds.has(kind)).map((kind) => ({
      name: kind[0], glyph: kind[1], colour: kind[2],
      count: this.blocks.filter((block) => this.kindOf(block) === kind).length,
      isOn: this.kind === kind[0],
      press: () => { this.kind = this.kind === kind[0] ? undefined : kind[0]; },
    }));
  }
}
