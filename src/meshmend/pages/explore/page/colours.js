// The colours of pictures, for a light and a dark page; the same palette as meshmend's SVG files.

const LIGHT = {
  ink: "#1c242d", soft: "#51606f", chip: "#dbe4ee", edge: "#8c9bab", failed: "#f3b6ab",
  cross: "#b02a17", stranded: "#c5cbd2", link: "#c3ccd6", cut: "#c8321e", limit: "#b02a17",
  cursor: "#0064a8", page: "#f4f6f8", slow: "#b86e00", waiting: "#fbe38e", forming: "#cfe3f5",
  heat: ["#dee9f4", "#96c4e2", "#488ecd", "#6254b2", "#7a2478", "#46042e"],
  series: ["#0064a8", "#c14f00", "#00785a", "#a6457c", "#2b7fb5", "#7d6200", "#444b54", "#7a5cc0"],
};
const DARK = {
  ink: "#e4e9ef", soft: "#a9b5c1", chip: "#2a3541", edge: "#718093", failed: "#6b2e25",
  cross: "#ff8a75", stranded: "#4b5663", link: "#3b4856", cut: "#ff7d66", limit: "#ff8a75",
  cursor: "#7cc0f5", page: "#0f141a", slow: "#ffb84d", waiting: "#7d6a1c", forming: "#2d5675",
  heat: ["#24303d", "#2d5675", "#3a80b8", "#8f7be0", "#e07ad0", "#ffe0f2"],
  series: ["#59aef0", "#f08a4a", "#3fbf95", "#d983b4", "#8fd0ff", "#d8b93a", "#b6c0cb", "#b49cf0"],
};
const darkness = matchMedia("(prefers-color-scheme: dark)");

export const SHADES = 24;

export function theme() { return darkness.matches ? DARK : LIGHT; }

export function onThemeChange(callback) { darkness.addEventListener("change", callback); }

export function series(index) { return theme().series[index % theme().series.length]; }

// A soft colour of its own for the chips of each colour of a tiling.
export function tint(index) { return mixed(theme().page, series(index), 0.55); }

export function shadeOf(part) { return Math.round(Math.min(1, Math.max(0, part)) * (SHADES - 1)); }

export function heat(shade) {
  const stops = theme().heat, at = shade / (SHADES - 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return mixed(stops[low], stops[low + 1], at - low);
}

function mixed(from, to, share) {
  const parts = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const [one, other] = [parts(from), parts(to)];
  return `rgb(${one.map((value, i) => Math.round(value + share * (other[i] - value))).join(",")})`;
}
