// What a picture consists of: paths and texts in the coordinates of the mesh.
// The canvas and the SVG file are painted from the same list, so they show the same.

import { PITCH, linkKey } from "./geometry.js";
import { SHADES, heat, series, shadeOf, theme } from "./colours.js";

const SIDE = 11; // of a chip
const n = (value) => Math.round(value * 100) / 100;

function line([a, b, c, d]) { return `M${n(a)} ${n(b)}L${n(c)} ${n(d)}`; }

function square([x, y], side = SIDE) {
  return `M${n(x - side / 2)} ${n(y - side / 2)}h${side}v${side}h${-side}z`;
}

// Chips, failed links and names: what every picture shows.
export function meshScene(model) {
  const { geometry, failed, stranded } = model, colours = theme();
  const fills = { live: "", failed: "", stranded: "" };
  let crosses = "";
  const special = {};
  for (let chip = 0; chip < geometry.nChips; chip++) {
    const at = geometry.centre(chip);
    const kind = failed.chips.has(chip) ? "failed" : stranded.has(chip) ? "stranded" : "live";
    const fill = kind === "live" && model.fillOf ? model.fillOf(chip) : null;
    if (fill) special[fill] = (special[fill] ?? "") + square(at);
    else fills[kind] += square(at);
    if (kind === "failed") {
      const [x, y] = at;
      crosses += line([x - 3, y - 3, x + 3, y + 3]) + line([x - 3, y + 3, x + 3, y - 3]);
    }
  }
  const cuts = [...failed.links].map((key) => linkLines(geometry, key)).join("");
  const slow = [...model.slow].filter(([key]) => !failed.links.has(key)).map(([key, speed]) => ({
    d: linkLines(geometry, key), stroke: colours.slow, width: 1.2 + 2 * speed }));
  return [
    ...tileScene(model),
    { d: fills.live, fill: colours.chip, stroke: colours.edge, width: 0.6 },
    ...Object.entries(special).map(([fill, d]) => ({ d, fill, stroke: colours.edge, width: 0.6 })),
    { d: fills.stranded, fill: colours.stranded, stroke: colours.edge, width: 0.6 },
    { d: fills.failed, fill: colours.failed, stroke: colours.cross, width: 0.6 },
    { d: crosses, stroke: colours.cross, width: 1.2 },
    { d: cuts, stroke: colours.cut, width: 2, dash: [2, 2] },
    ...slow,
    ...names(geometry, !!model.plan?.tiling),
  ].filter((item) => item.text || item.d);
}

function linkLines(geometry, key) {
  const [one, other] = key.split("-").map(Number);
  let d = "";
  for (let port = 0; port < geometry.nPorts; port++)
    for (const [here, there] of [[one, other], [other, one]])
      if (geometry.neighbour(here, port) === there) d += line(geometry.lane(here, port, 0));
  return d;
}

// A border around each tile: along every side of a chip where another tile begins.
function tileScene({ geometry, plan }) {
  const tiles = plan?.tiling?.tile_of, half = PITCH / 2 - 1;
  let d = "";
  for (let chip = 0; tiles && chip < geometry.nChips; chip++) {
    if (tiles[chip] < 0) continue;
    const [x, y] = geometry.centre(chip), ports = geometry.nPorts;
    const isInside = (port) => port >= 0 && tiles[geometry.neighbour(chip, port)] === tiles[chip];
    const end = (port) => (isInside(port) ? PITCH / 2 : half);
    const [left, right, up, down] = [ports - 2, ports - 1, ports - 4, ports - 3].map(end);
    if (!isInside(ports - 2)) d += line([x - half, y - up, x - half, y + down]);
    if (!isInside(ports - 1)) d += line([x + half, y - up, x + half, y + down]);
    if (!isInside(ports - 4)) d += line([x - left, y - half, x + right, y - half]);
    if (!isInside(ports - 3)) d += line([x - left, y + half, x + right, y + half]);
  }
  return d ? [{ d, stroke: theme().soft, width: 0.7 }] : [];
}

function names(geometry, isTiled) {
  const colours = theme(), items = [];
  if (geometry.nLayers > 1) {
    for (let layer = 0; layer < geometry.nLayers; layer++) {
      const [x, y] = geometry.layerOrigin(layer);
      items.push({ text: geometry.layerName(layer), x: x - SIDE / 2, y: y - 17,
        size: 0.62 * (geometry.gap - 1.5) * PITCH, fill: colours.soft, anchor: "start" });
    }
    return items;
  }
  const every = Math.max(1, Math.ceil(Math.max(geometry.rows, geometry.columns) / 32));
  // Links that wrap around are stubs beyond the border: names stand clear of them, and of tiles.
  const clear = (axis) => (geometry.wrap.at(axis) ? 13.5 : isTiled ? 11.5 : 9.5);
  const size = every > 1 && geometry.rows < 100 ? 10 : 7; // the fewer, the larger
  for (let column = 0; column < geometry.columns; column += every) {
    const [x, y] = geometry.centre(column);
    items.push({ text: `${column}`, x, y: y - clear(-2), size, fill: colours.soft, anchor: "middle" });
  }
  for (let row = 0; geometry.shape.length > 1 && row < geometry.rows; row += every) {
    const [x, y] = geometry.centre(row * geometry.columns);
    items.push({ text: `${row}`, x: x - clear(-1), y: y + 2.5, size, fill: colours.soft, anchor: "end" });
  }
  return items;
}

export function isAlive(model, chip, port) {
  const there = model.geometry.neighbour(chip, port), dead = model.failed.chips;
  if (there < 0 || dead.has(chip) || dead.has(there)) return false;
  return !model.failed.links.has(`${Math.min(chip, there)}-${Math.max(chip, there)}`);
}

// All live links, as plain lines.
export function linkScene(model) {
  let d = "";
  for (let chip = 0; chip < model.geometry.nChips; chip++)
    for (let port = 1; port < model.geometry.nPorts; port += 2)
      if (isAlive(model, chip, port)) d += line(model.geometry.lane(chip, port, 0));
  return d ? [{ d, stroke: theme().link, width: 1 }] : [];
}

// One value from 0 to 1 per channel, as shades; `values(channel)` is a shade or -1 for none.
export function shadedScene(model, shadeOf, width = 2.2) {
  const { geometry } = model, byShade = Array(SHADES).fill("");
  for (let chip = 0; chip < geometry.nChips; chip++) {
    for (let port = 0; port < geometry.nPorts; port++) {
      const shade = shadeOf(chip * geometry.nPorts + port);
      if (shade >= 0 && isAlive(model, chip, port)) byShade[shade] += line(geometry.lane(chip, port));
    }
  }
  return byShade.map((d, shade) => ({ d, stroke: heat(shade), width })).filter((item) => item.d);
}

export function loadScene(model) {
  const { loads, max_load: most } = model.plan;
  return shadedScene(model, (channel) => shadeOf((loads[channel] ?? 0) / (most || 1)));
}

export function frameScene(model, busy, frame, nChannels) {
  const from = frame * nChannels;
  return shadedScene(model, (channel) => {
    const value = busy[from + channel];
    return value < 8 ? -1 : Math.round(value / 255 * (SHADES - 1));
  }, 2.6);
}

// Trees or rings in colours; with more than one, each keeps to a lane of its own.
export function flowScene(model, flow, part) {
  const { geometry } = model, chosen = flow.parts.map((channels, index) => ({ channels, index }))
    .filter(({ index }) => part < 0 || index === part);
  const lanes = Math.min(4, chosen.length);
  return chosen.flatMap(({ channels, index }, place) => {
    const aside = lanes > 1 && flow.kind === "tree" ? (place % lanes - (lanes - 1) / 2) * 1.5 : 1.4;
    let d = "", heads = "";
    for (const channel of channels) {
      const chip = Math.floor(channel / geometry.nPorts), port = channel % geometry.nPorts;
      const [a, b, c, e] = geometry.lane(chip, port, aside);
      d += line([a, b, c, e]);
      const length = Math.hypot(c - a, e - b) || 1, ux = (c - a) / length, uy = (e - b) / length;
      heads += `M${n(c)} ${n(e)}L${n(c - 3.4 * ux - 1.7 * uy)} ${n(e - 3.4 * uy + 1.7 * ux)}`
        + `L${n(c - 3.4 * ux + 1.7 * uy)} ${n(e - 3.4 * uy - 1.7 * ux)}z`;
    }
    return [{ d, stroke: series(index), width: chosen.length > 8 ? 0.9 : 1.6 },
      { d: heads, fill: series(index) }];
  });
}

// What the loss of each link costs, as shades of both its directions.
export function heatScene(model, costs) {
  const { geometry } = model;
  return shadedScene(model, (channel) => {
    const chip = Math.floor(channel / geometry.nPorts), there = geometry.neighbour(chip, channel % geometry.nPorts);
    return costs.shade(costs.links.get(linkKey(chip, there)));
  }, 3);
}

// The first part of the ways of a flow: trees grow from their roots, rings go around.
export function grown(flow, geometry, part) {
  const order = (channels) => {
    const from = new Map(channels.map((channel) => [Math.floor(channel / geometry.nPorts), channel]));
    const depths = new Map();
    const depth = (chip) => {
      if (!from.has(chip) || flow.kind !== "tree") return 0;
      if (!depths.has(chip)) {
        depths.set(chip, 0);
        const channel = from.get(chip);
        depths.set(chip, 1 + depth(geometry.neighbour(chip, channel % geometry.nPorts)));
      }
      return depths.get(chip);
    };
    return [...channels].sort((one, other) => depth(Math.floor(one / geometry.nPorts))
      - depth(Math.floor(other / geometry.nPorts)));
  };
  const ordered = flow.parts.slice(0, part).map(order);
  return (share) => ({ ...flow, parts: ordered.map((channels) => channels.slice(0, Math.ceil(share * channels.length))) });
}

export function cursorScene(geometry, chip) {
  if (chip < 0 || chip >= geometry.nChips) return [];
  return [{ d: square(geometry.centre(chip), PITCH - 3), stroke: theme().cursor, width: 1.8 }];
}

// Lines are at least `least` wide, so that small pictures keep them.
export function paint(ctx, items, least = 0) {
  for (const item of items) {
    if (item.text) {
      ctx.fillStyle = item.fill;
      ctx.font = `${item.size}px Helvetica, Arial, sans-serif`;
      ctx.textAlign = item.anchor === "middle" ? "center" : item.anchor;
      ctx.fillText(item.text, item.x, item.y);
      continue;
    }
    item.path ??= new Path2D(item.d);
    if (item.fill) { ctx.fillStyle = item.fill; ctx.fill(item.path); }
    if (item.stroke) {
      ctx.strokeStyle = item.stroke;
      ctx.lineWidth = Math.max(item.width, least);
      ctx.setLineDash(item.dash ?? []);
      ctx.stroke(item.path);
    }
  }
}

const escaped = (text) => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

export function svgText(items, geometry, title) {
  const marks = items.map((item) => item.text
    ? `<text x="${n(item.x)}" y="${n(item.y)}" font-size="${item.size}" fill="${item.fill}"`
      + ` text-anchor="${item.anchor}" font-family="Helvetica, Arial, sans-serif">`
      + `${escaped(item.text)}</text>`
    : `<path d="${item.d}" fill="${item.fill ?? "none"}" stroke="${item.stroke ?? "none"}"`
      + ` stroke-width="${item.width ?? 0}"${item.dash ? ` stroke-dasharray="${item.dash}"` : ""}/>`);
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${n(geometry.width)}" height="`
    + `${n(geometry.height)}" viewBox="0 0 ${n(geometry.width)} ${n(geometry.height)}">`
    + `<title>${escaped(title)}</title><rect width="100%" height="100%" fill="${theme().page}"/>`
    + `${marks.join("\n")}</svg>\n`;
}
