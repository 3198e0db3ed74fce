// A running job on the page: the mesh as it is now, steps, loss, recoveries, and who waits.

import { byId, element, figure, timeWords } from "./words.js";
import { series } from "./colours.js";

const MOST_EVENTS = 200;
const MOST_LOSSES = 2000;
const MOST_POINTS = 300; // of the loss curve, which is about as many pixels wide
const SVG = "http://www.w3.org/2000/svg";

export class Job {
  constructor(onStatus) {
    this.onStatus = onStatus;
    this.losses = [];
    this.status = null;
    byId("live").hidden = false;
    this.follow();
  }

  async follow() {
    for (;;) {
      try {
        const response = await fetch("live");
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        byId("job-events").replaceChildren();
        this.losses = [];
        let text = "";
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          const parts = (text + value).split("\n");
          text = parts.pop();
          for (const part of parts) if (part) this.take(JSON.parse(part));
        }
      } catch { /* the server is away: try again */ }
      byId("job-title").textContent = "The job: the explorer's server is away";
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  take(news) {
    if (news.kind === "status") {
      this.status = news;
      this.showStatus(news);
      if (!document.hidden) this.showLoss();
      this.onStatus(news);
    } else if (news.kind === "silence") {
      byId("job-title").textContent = `The job does not answer: ${news.why}`;
    } else if (news.kind === "steps") {
      this.losses.push(...news.steps);
      this.losses.splice(0, this.losses.length - MOST_LOSSES);
      this.step = this.losses.at(-1)?.[0]; // drawn with the status, which follows: one picture less
    } else this.addEvent(news);
  }

  addEvent(news) {
    const list = byId("job-events"), line = element("li", { "data-event": news.event.event });
    line.append(element("time", {}, new Date(1000 * news.at).toLocaleTimeString("en-GB")), news.words);
    list.prepend(line);
    while (list.children.length > MOST_EVENTS) list.lastChild.remove();
  }

  showStatus(status) {
    const step = Math.max(status.step, this.step ?? 0), last = status.changes.at(-1);
    const recoveries = status.changes.filter((each) => each.cause === "left");
    byId("job-title").textContent = `Job ${status.job}: ${status.phase}`
      + (status.answered_by ? ` (says chip ${status.answered_by}; the coordinator is away)` : "")
      + (status.failure ? `: ${status.failure}` : "");
    const loss = this.losses.at(-1)?.[1];
    byId("job-figures").replaceChildren(
      figure("step", `${step}`, status.steps ? `of ${status.steps}` : ""),
      figure("steps a second", status.steps_per_s ? status.steps_per_s.toPrecision(3) : "–",
        status.samples_per_s ? `${Math.round(status.samples_per_s)} samples a second` : ""),
      figure("loss", typeof loss === "number" ? loss.toPrecision(4) : "–"),
      figure("chips that train", `${status.members.length}`,
        status.waiting.length ? `${status.waiting.length} wait` : `generation ${status.generation ?? "–"}`),
      figure("recoveries", `${recoveries.length}`,
        last ? `last change took ${timeWords(last.took_s)}` : "none yet"));
    byId("job-waits").textContent = status.waits.map((wait) => {
      const chips = (list) => list.length > 4 ? `${list.length} chips`
        : list.map((chip) => chip.join(",")).join(" and ");
      return `${chips(wait.chips)} wait${wait.awaited.length ? ` for ${chips(wait.awaited)}` : ""}: ${wait.why}`
        + (wait.since_s ? `, since ${timeWords(wait.since_s)}` : "");
    }).join("; ");
  }

  showLoss() {
    const numbers = this.losses.filter(([, loss]) => typeof loss === "number");
    const every = Math.ceil(numbers.length / MOST_POINTS), last = numbers.length - 1;
    const known = numbers.filter((_, place) => (last - place) % every === 0);
    if (known.length < 2) return;
    const [width, height] = [420, 90], values = known.map(([, loss]) => loss);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const [first, final] = [known[0][0], known.at(-1)[0]];
    const points = known.map(([step, loss]) => `${(step - first) / ((final - first) || 1) * width},`
      + `${4 + (high - loss) / ((high - low) || 1) * (height - 8)}`).join(" ");
    const svg = document.createElementNS(SVG, "svg"), curve = document.createElementNS(SVG, "polyline");
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `Loss from step ${first} to ${final}: from ${values[0].toPrecision(3)} to ${values.at(-1).toPrecision(3)}`,
      preserveAspectRatio: "none" })) svg.setAttribute(key, value);
    for (const [key, value] of Object.entries({ points, fill: "none", stroke: series(0), "stroke-width": 2,
      "vector-effect": "non-scaling-stroke" })) curve.setAttribute(key, value);
    svg.append(curve);
    byId("job-loss").replaceChildren(svg);
  }
}
