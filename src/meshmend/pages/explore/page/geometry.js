// Where chips and links of a mesh are drawn, and how failures are written.
// The last axis runs to the right, the one before it downwards; every choice of the axes before
// these is a layer of its own. A channel is `chip * ports + port`, as in the planner's answers.

export const PITCH = 20;

export class Geometry {
  constructor(shape, wrap) {
    this.shape = shape;
    this.wrap = wrap;
    this.nPorts = 2 * shape.length;
    this.nChips = shape.reduce((all, size) => all * size, 1);
    this.strides = shape.map((_, axis) => shape.slice(axis + 1).reduce((all, n) => all * n, 1));
    this.columns = shape.at(-1);
    this.rows = shape.length > 1 ? shape.at(-2) : 1;
    this.nLayers = this.nChips / (this.columns * this.rows);
    // Between layers there is room for their names, larger where there are more of them.
    // Links that wrap around take some of the room at the border.
    this.gap = this.nLayers > 1 ? Math.max(2.8, 1 + 0.2 * this.rows) : wrap.includes(true) ? 2.8 : 2.2;
    this.layersPerRow = Math.min(this.nLayers, Math.ceil(Math.sqrt(this.nLayers * this.rows / this.columns)));
    this.layerWidth = (this.columns - 1 + this.gap) * PITCH;
    this.layerHeight = (this.rows - 1 + this.gap) * PITCH;
    this.width = this.layersPerRow * this.layerWidth;
    this.height = Math.ceil(this.nLayers / this.layersPerRow) * this.layerHeight;
  }

  chipAt(coordinates) {
    return coordinates.reduce((sum, at, axis) => sum + at * this.strides[axis], 0);
  }

  coordinates(chip) {
    return this.shape.map((size, axis) => Math.floor(chip / this.strides[axis]) % size);
  }

  name(chip) { return this.coordinates(chip).join(","); }

  layerOf(chip) { return Math.floor(chip / (this.rows * this.columns)); }

  layerName(layer) {
    const at = this.coordinates(layer * this.rows * this.columns).slice(0, -2);
    return `layer ${at.join(",")}`;
  }

  layerOrigin(layer) {
    const [down, right] = [Math.floor(layer / this.layersPerRow), layer % this.layersPerRow];
    return [right * this.layerWidth + this.gap / 2 * PITCH,
      down * this.layerHeight + (this.gap - 1.1) * PITCH];
  }

  centre(chip) {
    const [x, y] = this.layerOrigin(this.layerOf(chip));
    const inside = chip % (this.rows * this.columns);
    return [x + (inside % this.columns) * PITCH, y + Math.floor(inside / this.columns) * PITCH];
  }

  // The chip behind a port, alive or not; -1 at a border.
  neighbour(chip, port) {
    const axis = port >> 1, step = port & 1 ? 1 : -1, size = this.shape[axis];
    const at = Math.floor(chip / this.strides[axis]) % size, to = at + step;
    if (to >= 0 && to < size) return chip + step * this.strides[axis];
    return this.wrap[axis] && size > 2 ? chip - step * (size - 1) * this.strides[axis] : -1;
  }

  // The line of a channel, a little to the right of its way; links that leave the layer or wrap
  // around are short stubs.
  lane(chip, port, aside = 1.7) {
    const [x, y] = this.centre(chip), axis = (port >> 1) - this.shape.length;
    const up = port & 1 ? 1 : -1, there = this.neighbour(chip, port);
    let dx = 0, dy = 0, near = 6, far = PITCH - 6;
    if (axis === -1) dx = up;
    else if (axis === -2) dy = up;
    else { [dx, dy] = axis % 2 ? [0.7 * up, -0.7 * up] : [-0.7 * up, -0.7 * up]; near = 5; far = 10.5; }
    if (axis >= -2 && Math.abs(there - chip) !== this.strides.at(axis)) far = 12;
    const sx = -dy * aside, sy = dx * aside;
    return [x + dx * near + sx, y + dy * near + sy, x + dx * far + sx, y + dy * far + sy];
  }

  // The chip nearest to a point, or -1.
  chipNear(x, y) {
    const layer = Math.floor(y / this.layerHeight) * this.layersPerRow
      + Math.floor(x / this.layerWidth);
    if (x < 0 || y < 0 || x >= this.width || layer < 0 || layer >= this.nLayers) return -1;
    const [x0, y0] = this.layerOrigin(layer);
    const column = Math.round((x - x0) / PITCH), row = Math.round((y - y0) / PITCH);
    if (column < 0 || column >= this.columns || row < 0 || row >= this.rows) return -1;
    return layer * this.rows * this.columns + row * this.columns + column;
  }

  // The link nearest to a point, as "low-high", or "".
  linkNear(x, y) {
    const chip = this.chipNear(x, y);
    if (chip < 0) return "";
    let best = "", least = Infinity;
    for (let port = 0; port < this.nPorts; port++) {
      const there = this.neighbour(chip, port);
      if (there < 0) continue;
      const [a, b, c, d] = this.lane(chip, port, 0);
      const apart = Math.hypot((a + c) / 2 - x, (b + d) / 2 - y);
      if (apart < least) { least = apart; best = linkKey(chip, there); }
    }
    return best;
  }

  // The chips of the board or host that holds a chip.
  region(chip, size) {
    const at = this.coordinates(chip), shape = at.map((_, axis) => size[axis] ?? 1);
    if (at.length < 2) return [chip];
    const from = at.map((value, axis) => value - value % shape[axis]);
    return boxChips(shape, from).filter((each) => each.every((v, axis) => v < this.shape[axis]))
      .map((each) => this.chipAt(each));
  }
}

export function linkKey(one, other) { return `${Math.min(one, other)}-${Math.max(one, other)}`; }

function boxChips(shape, origin) {
  return shape.reduce((found, size, axis) => found.flatMap((chip) =>
    Array.from({ length: size }, (_, step) => [...chip, origin[axis] + step])), [[]]);
}

export function parseShape(text) {
  if (!/^\s*\d+(x\d+)*\s*$/.test(text)) throw new Error(`A mesh is written 16x32, but got “${text}”.`);
  const shape = text.trim().split("x").map(Number);
  if (shape.some((size) => size < 1)) throw new Error("A mesh needs positive extents.");
  return shape;
}

export function parseWrap(text, nAxes) {
  const word = text.trim().toLowerCase();
  if (word === "none" || word === "all") return Array(nAxes).fill(word === "all");
  const axes = word.split(",").map(Number);
  if (!/^\d+(,\d+)*$/.test(word) || axes.some((axis) => axis >= nAxes))
    throw new Error(`Wrap is none, all, or axes from 0 to ${nAxes - 1}, but got “${text}”.`);
  return Array.from({ length: nAxes }, (_, axis) => axes.includes(axis));
}

// Returns the failed chips and links that words such as 2x2@4,4 and link:0,0-0,1 name.
export function parseFailures(words, geometry, regions) {
  const chips = new Set(), links = new Set();
  const chipOf = (text) => {
    const at = text.split(",").map(Number);
    if (!/^\d+(,\d+)*$/.test(text) || at.length !== geometry.shape.length
        || at.some((value, axis) => value >= geometry.shape[axis]))
      throw new Error(`The mesh has no chip “${text}”.`);
    return geometry.chipAt(at);
  };
  for (const word of words) {
    const [kind, rest] = word.includes(":") ? word.split(":") : ["", word];
    if (kind === "link") {
      const [one, other] = rest.split("-").map((text) => chipOf(text ?? ""));
      const ports = Array.from({ length: geometry.nPorts }, (_, port) => port);
      if (other === undefined || !ports.some((port) => geometry.neighbour(one, port) === other))
        throw new Error(`The mesh has no link “${word}”.`);
      links.add(linkKey(one, other));
    } else if (kind) {
      if (!regions[kind]) throw new Error(`Cannot read “${word}”.`);
      geometry.region(chipOf(rest), regions[kind]).forEach((chip) => chips.add(chip));
    } else if (word.includes("@")) {
      const [size, origin] = word.split("@"), from = geometry.coordinates(chipOf(origin));
      const shape = parseShape(size);
      if (shape.length !== from.length) throw new Error(`“${word}” needs ${from.length} axes.`);
      boxChips(shape, from).forEach((each) => chips.add(chipOf(each.join(","))));
    } else chips.add(chipOf(word));
  }
  return { chips, links };
}

// Returns the speed of each link that words such as link:0,0-0,1=0.25 name.
export function parseSlow(words, geometry) {
  const speeds = new Map();
  for (const word of words) {
    const [, name, speed] = /^(link:[^=]*)=([0-9.]+)$/.exec(word) ?? [];
    if (!name || !(speed >= 0.001 && speed <= 1))
      throw new Error(`A slow link is written link:0,0-0,1=0.25, with a speed from 0.001 to 1, but got “${word}”.`);
    const [link] = parseFailures([name], geometry, {}).links;
    if (Number(speed) < 1) speeds.set(link, Number(speed)); else speeds.delete(link);
  }
  return speeds;
}

// Returns the words for slow links, in the order of their chips.
export function slowWords(speeds, geometry) {
  return [...speeds].map(([link, speed]) => [link.split("-").map(Number), speed])
    .sort(([one], [other]) => one[0] - other[0] || one[1] - other[1])
    .map(([[one, other], speed]) => `link:${geometry.name(one)}-${geometry.name(other)}=${speed}`);
}

// Returns the words for failures: few blocks that cover the chips, then links.
export function failureWords(chips, links, geometry) {
  const left = new Set(chips), words = [];
  for (const chip of [...chips].sort((a, b) => a - b)) {
    if (!left.has(chip)) continue;
    const from = geometry.coordinates(chip), shape = from.map(() => 1);
    for (let axis = from.length - 1; axis >= 0; axis--) {
      for (;;) {
        const longer = shape.map((size, each) => size + (each === axis ? 1 : 0));
        if (from[axis] + longer[axis] > geometry.shape[axis]) break;
        if (!boxChips(longer, from).every((each) => left.has(geometry.chipAt(each)))) break;
        shape[axis]++;
      }
    }
    boxChips(shape, from).forEach((each) => left.delete(geometry.chipAt(each)));
    const at = from.join(",");
    words.push(shape.every((size) => size === 1) ? at : `${shape.join("x")}@${at}`);
  }
  for (const key of [...links].sort()) {
    const [one, other] = key.split("-").map(Number);
    words.push(`link:${geometry.name(one)}-${geometry.name(other)}`);
  }
  return words;
}
