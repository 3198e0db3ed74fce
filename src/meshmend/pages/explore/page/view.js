// The canvas: shows a scene, moves and zooms it at the screen's own rate, and reports clicks.
// While it moves, the last picture is shifted and scaled; it is painted sharp again at rest.

import { paint } from "./scene.js";

const SHARPEN_AFTER_MS = 150; // longer than a late picture of a drag takes on a busy machine
const MARGIN = 0.35; // of the canvas, painted beyond each side so that a drag shows no blank edge

export class View {
  constructor(canvas, onClick, onHover) {
    this.canvas = canvas;
    this.ctx = canvas.getContext("2d");
    this.buffer = document.createElement("canvas");
    this.items = [];
    this.overlay = [];
    this.size = [1, 1];
    this.at = { x: 0, y: 0, scale: 1 };
    this.painted = null;
    this.isFitted = true;
    this.isScheduled = false;
    this.pointers = new Map();
    this.onClick = onClick;
    new ResizeObserver(() => this.resize()).observe(canvas);
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY * 0.0016), event.offsetX, event.offsetY);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event, onHover));
    for (const name of ["pointerup", "pointercancel"])
      canvas.addEventListener(name, (event) => this.release(event));
    this.resize();
  }

  resize() {
    const ratio = Math.min(2, devicePixelRatio || 1), box = this.canvas.getBoundingClientRect();
    this.ratio = ratio;
    this.box = [Math.max(1, box.width), Math.max(1, box.height)];
    this.canvas.width = Math.round(this.box[0] * ratio);
    this.canvas.height = Math.round(this.box[1] * ratio);
    this.buffer.width = Math.round(this.canvas.width * (1 + 2 * MARGIN));
    this.buffer.height = Math.round(this.canvas.height * (1 + 2 * MARGIN));
    this.painted = null;
    if (this.isFitted) this.fit(); else this.schedule();
  }

  // Shows new items; `size` is that of the mesh, for `fit`.
  show(items, size) {
    const isOther = size[0] !== this.size[0] || size[1] !== this.size[1];
    this.items = items;
    this.size = size;
    this.painted = null;
    if (isOther) this.fit(); else this.schedule();
  }

  showOverlay(items) { this.overlay = items; this.schedule(); }

  fit() {
    this.focus(0, 0, ...this.size);
    this.isFitted = true;
  }

  // Shows a rectangle of the mesh as large as it fits.
  focus(x, y, width, height) {
    const scale = Math.min(this.box[0] / width, this.box[1] / height, 4);
    this.at = { scale, x: (this.box[0] - scale * width) / 2 - scale * x,
      y: (this.box[1] - scale * height) / 2 - scale * y };
    this.isFitted = false;
    this.painted = null;
    this.schedule();
  }

  zoom(factor, x = this.box[0] / 2, y = this.box[1] / 2) {
    const scale = Math.min(20, Math.max(0.05, this.at.scale * factor)), by = scale / this.at.scale;
    this.at = { scale, x: x - (x - this.at.x) * by, y: y - (y - this.at.y) * by };
    this.isFitted = false;
    this.moved();
  }

  move(dx, dy) {
    this.at = { ...this.at, x: this.at.x + dx, y: this.at.y + dy };
    this.isFitted = false;
    this.moved();
  }

  moved() {
    this.schedule();
    clearTimeout(this.sharpening);
    this.sharpening = setTimeout(() => { this.painted = null; this.schedule(); }, SHARPEN_AFTER_MS);
  }

  meshPoint(x, y) { return [(x - this.at.x) / this.at.scale, (y - this.at.y) / this.at.scale]; }

  schedule() {
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame(() => { this.isScheduled = false; this.paint(); });
  }

  paint() {
    const { ctx, ratio, at } = this;
    if (!this.painted) this.paintBuffer();
    const by = at.scale / this.painted.scale;
    const marginX = MARGIN * this.box[0], marginY = MARGIN * this.box[1];
    const shift = [at.x - (this.painted.x + marginX) * by, at.y - (this.painted.y + marginY) * by]
      .map((value) => value * ratio);
    // Moved by whole pixels and copied over what was there, a picture is blended with nothing.
    if (by === 1) ctx.setTransform(1, 0, 0, 1, ...shift.map(Math.round));
    else ctx.setTransform(by, 0, 0, by, ...shift);
    ctx.imageSmoothingEnabled = by !== 1;
    ctx.globalCompositeOperation = "copy";
    ctx.drawImage(this.buffer, 0, 0);
    ctx.globalCompositeOperation = "source-over";
    if (this.overlay.length) {
      ctx.setTransform(at.scale * ratio, 0, 0, at.scale * ratio, at.x * ratio, at.y * ratio);
      paint(ctx, this.overlay, 1 / at.scale);
    }
  }

  paintBuffer() {
    const ctx = this.buffer.getContext("2d"), { ratio, at } = this;
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.clearRect(0, 0, this.buffer.width, this.buffer.height);
    ctx.setTransform(at.scale * ratio, 0, 0, at.scale * ratio,
      (at.x + MARGIN * this.box[0]) * ratio, (at.y + MARGIN * this.box[1]) * ratio);
    paint(ctx, this.items, 1 / at.scale);
    this.painted = { ...at };
    if (this.items.length && !performance.getEntriesByName("picture").length) performance.mark("picture");
  }

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    this.dragged = this.pointers.size > 1 ? Infinity : 0;
  }

  drag(event, onHover) {
    const before = this.pointers.get(event.pointerId), now = [event.offsetX, event.offsetY];
    if (!before) { onHover(...this.meshPoint(...now)); return; }
    const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
    this.dragged += Math.abs(dx) + Math.abs(dy);
    this.pointers.set(event.pointerId, now);
    if (this.pointers.size === 2) {
      const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
      const apart = (point) => Math.hypot(point[0] - other[0], point[1] - other[1]) || 1;
      this.zoom(apart(now) / apart(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
    } else if (this.dragged > 5) this.move(dx, dy);
  }

  release(event) {
    const isClick = this.pointers.delete(event.pointerId) && this.dragged <= 5;
    if (isClick && event.type === "pointerup")
      this.onClick(...this.meshPoint(event.offsetX, event.offsetY));
  }
}
