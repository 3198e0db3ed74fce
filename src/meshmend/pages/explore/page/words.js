// Times, sizes and elements of the page.

export const byId = (id) => document.getElementById(id);

export function timeWords(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]])
    if (seconds >= size) return `${Number((seconds / size).toPrecision(3))} ${unit}`;
  return `${Number((seconds * 1e9).toPrecision(3))} ns`;
}

export function sizeWords(bytes) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["KB", 1e3]])
    if (bytes >= size) return `${Number((bytes / size).toPrecision(3))} ${unit}`;
  return `${bytes} B`;
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    if (key === "class") made.className = value; else made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Changes a text only if it is another one: an equal one would be laid out and painted too.
export function setText(where, words) { if (where.textContent !== words) where.textContent = words; }

export function figure(name, value, note = "", kind = "") {
  return element("div", {}, element("span", {}, name),
    element("b", kind ? { class: kind } : {}, value), element("span", {}, note));
}

export function download(name, type, parts) {
  const link = element("a", { download: name,
    href: URL.createObjectURL(new Blob(parts, { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

export function csv(rows) {
  const cell = (value) => /[",\n]/.test(`${value}`) ? `"${`${value}`.replaceAll('"', '""')}"` : value;
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
