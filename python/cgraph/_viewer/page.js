"use strict";
// What all views need: the page's parts, colours, and a stage that is zoomed and dragged.
const root = document.documentElement;
addEventListener("error", (event) => { root.dataset.error = event.message; });
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const SANS = 'system-ui, "DejaVu Sans", sans-serif';

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function units(count) {
  let unit = "B";
  for (const next of ["KiB", "MiB", "GiB", "TiB"]) {
    if (count < 1024) break;
    [count, unit] = [count / 1024, next];
  }
  return unit === "B" ? `${count} B` : `${count.toFixed(1)} ${unit}`;
}

// The colour of a letter on one of a family's: all but the darkest blue are light.
const letterColour = (colour) => (colour === "#0072b2" ? "#ffffff" : "#10151c");

const ink = {};
function readColours() {
  const style = getComputedStyle(root);
  const names = ["ground", "ink", "faint", "rule", "group", "group2", "edge", "accent", "hit"];
  for (const name of [...names, "card"]) ink[name] = style.getPropertyValue(`--${name}`).trim();
}

// A canvas whose content is moved and scaled; a view draws on it and says what a point hits.
class Stage {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.x = this.y = 0;
    this.kx = this.ky = 1;
    this.waits = false;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.drag(event));
    new ResizeObserver(() => this.resize()).observe(canvas);
  }

  // The width that the panel leaves.
  get free() {
    const panel = at("panel");
    return this.width - (panel.hidden ? 0 : panel.offsetWidth);
  }

  // At once, as a canvas is empty when its size has changed.
  resize() {
    const { width, height } = this.canvas.getBoundingClientRect();
    const ratio = devicePixelRatio || 1;
    if (this.width === width && this.height === height && this.ratio === ratio) return;
    [this.width, this.height, this.ratio] = [width, height, ratio];
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    if (this.isFitted && this.view) this.view.fit(this);
    this.draw();
  }

  fit() {
    this.view?.fit(this);
    this.isFitted = true;
    this.redraw();
  }

  zoom(factor, x = this.width / 2, y = this.height / 2, axis = "xy") {
    const by = (k, goes) => (goes ? Math.min(Math.max(k * factor, 0.004), 4000) / k : 1);
    const [fx, fy] = [by(this.kx, axis.includes("x")), by(this.ky, axis.includes("y"))];
    [this.x, this.y] = [x - (x - this.x) * fx, y - (y - this.y) * fy];
    [this.kx, this.ky] = [this.kx * fx, this.ky * fy];
    this.isFitted = false;
    this.redraw();
  }

  wheel(event) {
    event.preventDefault();
    const { left, top } = this.canvas.getBoundingClientRect();
    const factor = Math.exp(-Math.max(-60, Math.min(60, event.deltaY || event.deltaX)) / 240);
    const axis = !this.view.hasTwoScales ? "xy" : event.shiftKey ? "x" : event.altKey ? "y" : "xy";
    this.zoom(factor, event.clientX - left, event.clientY - top, axis);
  }

  drag(event) {
    const start = [event.clientX, event.clientY, this.x, this.y];
    let isDrag = false;
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.onpointermove = (now) => {
      const [dx, dy] = [now.clientX - start[0], now.clientY - start[1]];
      isDrag = isDrag || Math.abs(dx) + Math.abs(dy) > 4;
      if (!isDrag) return;
      [this.x, this.y, this.isFitted] = [start[2] + dx, start[3] + dy, false];
      this.redraw();
    };
    this.canvas.onpointerup = this.canvas.onpointercancel = (up) => {
      this.canvas.onpointermove = this.canvas.onpointerup = this.canvas.onpointercancel = null;
      if (!isDrag && up.type === "pointerup") this.click(up.clientX, up.clientY);
    };
  }

  click(clientX, clientY) {
    const { left, top } = this.canvas.getBoundingClientRect();
    this.view.click(clientX - left, clientY - top);
  }

  redraw() {
    if (this.waits) return;
    this.waits = true;
    requestAnimationFrame(() => { this.waits = false; this.draw(); });
  }

  draw() {
    if (!this.view || !this.width) return;
    const pen = this.pen;
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.fillStyle = ink.ground;
    pen.fillRect(0, 0, this.width, this.height);
    this.view.draw(pen, this);
  }
}

// Text that fits a width, cut in its middle so that its end stays readable.
const widths = new Map();
function widthOf(pen, text) {
  const key = pen.font + text;
  if (!widths.has(key)) widths.set(key, pen.measureText(text).width);
  return widths.get(key);
}

function fitted(pen, text, width) {
  if (widthOf(pen, text) <= width) return text;
  const letters = Math.floor((text.length * width) / widthOf(pen, text)) - 1;
  if (letters < 2) return "";
  const end = Math.floor(letters * 0.35);
  return `${text.slice(0, letters - end)}…${text.slice(text.length - end)}`;
}

// The places of things whose text contains another one.
function placesOf(things, text) {
  const found = [];
  if (text) things.forEach(({ sought }, i) => { if (sought.includes(text)) found.push(i); });
  return found;
}

// The place of the last thing of which something is true, as it is drawn over the others.
function lastPlace(things, isIt) {
  for (let i = things.length - 1; i >= 0; i--) if (isIt(things[i])) return i;
  return -1;
}

// The place that an arrow key leads to.
function neighbour(place, key) {
  if (place === undefined) return 0;
  return place + (key === "ArrowUp" || key === "ArrowLeft" ? -1 : 1);
}

function rounded(pen, x, y, width, height, corner) {
  pen.beginPath();
  pen.roundRect(x, y, width, height, Math.min(corner, width / 2, height / 2));
}
