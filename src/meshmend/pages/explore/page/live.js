// A running job on the page: the mesh as it is now, steps, loss, recoveries, and who waits.
// The page may share its cores with the job: it changes what is new, and nothing while it is hidden.

import { byId, element, figure, setText, timeWords } from "./words.js";
import { series } from "./colours.js";

const MOST_EVENTS = 200;
const MOST_LOSSES = 2000;
const MOST_POINTS = 300; // of the loss curve, which is about as many pixels wide
const [WIDTH, HEIGHT] = [420, 90]; // of its picture
const CURVE_EVERY_MS = 5000; // it is the largest part of the page that changes with every step
const SVG = "http://www.w3.org/2000/svg";

export class Job {
  constructor(onStatus) {
    this.onStatus = onStatus;
    this.losses = [];
    this.status = null;
    this.end = null; // how the job has ended, in words
    byId("live").hidden = false;
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.closing?.abort(); });
    this.follow();
  }

  async follow() {
    for (;;) {
      await untilVisible();
      this.closing = new AbortController();
      let why = "the explorer's server is away: it was stopped, or the job has ended with it";
      try {
        const response = await fetch("live", { signal: this.closing.signal });
        if (response.ok) await this.read(response);
        else why = "the explorer was started anew; open the address that it printed";
      } catch { /* the server is away: try again */ }
      if (this.closing.signal.aborted) continue;
      if (this.end) { this.showEnd("; its explorer is closed"); return; }
      setText(byId("job-title"), `The job: ${why}`);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  // The server tells the past first, so what was shown before is dropped.
  async read(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    byId("job-events").replaceChildren();
    this.losses = [];
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (text + value).split("\n");
      text = parts.pop();
      for (const part of parts) if (part) this.take(JSON.parse(part));
    }
  }

  take(news) {
    if (news.kind === "status") {
      this.status = news;
      this.show();
      this.onStatus(news);
    } else if (news.kind === "silence") {
      setText(byId("job-title"), `The job does not answer, and is asked again: ${news.why}`);
    } else if (news.kind === "ended") {
      this.end = news.why;
      this.showEnd();
    } else if (news.kind === "steps") {
      this.losses.push(...news.steps);
      this.losses.splice(0, this.losses.length - MOST_LOSSES);
      this.step = this.losses.at(-1)?.[0];
      if (this.status) this.show();
    } else this.addEvent(news);
  }

  show() {
    this.showStatus(this.status);
    if (!(performance.now() - this.curveAt < CURVE_EVERY_MS)) this.showLoss();
  }

  addEvent(news) {
    const list = byId("job-events"), line = element("li", { "data-event": news.event.event });
    line.append(element("time", {}, new Date(1000 * news.at).toLocaleTimeString("en-GB")), news.words);
    list.prepend(line);
    while (list.children.length > MOST_EVENTS) list.lastChild.remove();
    if (["finished", "failed"].includes(news.event.event)) this.end = news.words;
  }

  showEnd(more = "") { setText(byId("job-title"), `${this.end[0].toUpperCase()}${this.end.slice(1)}${more}`); }

  showStatus(status) {
    const step = Math.max(status.step, this.step ?? 0), last = status.changes.at(-1);
    const recoveries = status.changes.filter((each) => each.cause === "left");
    setText(byId("job-title"), `Job ${status.job}: ${status.phase}`
      + (status.answered_by ? `; the coordinator is away, and chip ${status.answered_by} answers for it` : "")
      + (status.failure ? `: ${status.failure}` : ""));
    const loss = this.losses.at(-1)?.[1];
    showFigures([
      ["step", `${step}`, status.steps ? `of ${status.steps}` : ""],
      ["steps a second", status.steps_per_s ? status.steps_per_s.toPrecision(3) : "–",
        status.samples_per_s ? `${Math.round(status.samples_per_s)} samples a second` : ""],
      ["loss", typeof loss === "number" ? loss.toPrecision(4) : "–", ""],
      ["chips that train", `${status.members.length}`,
        status.waiting.length ? `${status.waiting.length} wait` : `generation ${status.generation ?? "–"}`],
      ["recoveries", `${recoveries.length}`,
        last ? `last change took ${timeWords(last.took_s)}` : "none yet"]]);
    setText(byId("job-waits"), status.waits.map((wait) => {
      const chips = (list) => list.length > 4 ? `${list.length} chips`
        : list.map((chip) => chip.join(",")).join(" and ");
      return `${chips(wait.chips)} wait${wait.awaited.length ? ` for ${chips(wait.awaited)}` : ""}: ${wait.why}`
        + (wait.since_s ? `, since ${timeWords(wait.since_s)}` : "");
    }).join("; "));
  }

  showLoss() {
    const numbers = this.losses.filter(([, loss]) => typeof loss === "number");
    const every = Math.ceil(numbers.length / MOST_POINTS), last = numbers.length - 1;
    const known = numbers.filter((_, place) => (last - place) % every === 0);
    if (known.length < 2) return;
    this.curveAt = performance.now();
    const values = known.map(([, loss]) => loss);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const [first, final] = [known[0][0], known.at(-1)[0]];
    const points = known.map(([step, loss]) => `${((step - first) / ((final - first) || 1) * WIDTH).toFixed(1)},`
      + `${(4 + (high - loss) / ((high - low) || 1) * (HEIGHT - 8)).toFixed(1)}`).join(" ");
    this.curve ??= lossCurve();
    this.curve.setAttribute("stroke", series(0));
    this.curve.setAttribute("points", points);
    this.curve.parentNode.setAttribute("aria-label", `Loss from step ${first} to ${final}: `
      + `from ${values[0].toPrecision(3)} to ${values.at(-1).toPrecision(3)}`);
  }
}

function untilVisible() {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });
}

function showFigures(cards) {
  const list = byId("job-figures");
  cards.forEach(([name, value, note], place) => {
    const [, number, words] = (list.children[place] ?? list.appendChild(figure(name, ""))).children;
    setText(number, value);
    setText(words, note);
  });
}

function lossCurve() {
  const svg = document.createElementNS(SVG, "svg"), curve = document.createElementNS(SVG, "polyline");
  for (const [key, value] of Object.entries({ viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
    preserveAspectRatio: "none" })) svg.setAttribute(key, value);
  for (const [key, value] of Object.entries({ fill: "none", "stroke-width": 2,
    "vector-effect": "non-scaling-stroke" })) curve.setAttribute(key, value);
  svg.append(curve);
  byId("job-loss").replaceChildren(svg);
  return curve;
}
