// The schedule as it runs: frames of how busy each channel is, played or moved through by hand.

import { byId, element, timeWords } from "./words.js";

const PLAY_MS = 8000;

export class Player {
  constructor(onFrame, onSlice, onPlay) {
    this.timeline = null;
    this.isPlaying = false;
    this.onFrame = onFrame;
    this.isWanted = false; // to play as soon as there is something to play
    byId("play").addEventListener("click", () => {
      if (this.timeline || this.isPlaying) { this.toggle(); return; }
      this.isWanted = true;
      onPlay();
    });
    byId("time").addEventListener("input", () => { this.stop(); this.show(Number(byId("time").value)); });
    byId("slice").addEventListener("change", () => onSlice(this.slice()));
  }

  slice() { const text = byId("slice").value; return text === "" ? null : Number(text); }

  load(answer) {
    const bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0)); // a server's
    this.timeline = { ...answer, busy: typeof answer.busy === "string" ? bytes(answer.busy) : answer.busy };
    this.nChannels = this.timeline.busy.length / answer.frames;
    byId("time").max = `${answer.frames - 1}`;
    if (byId("slice").options.length !== answer.shown + 1) {
      byId("slice").replaceChildren(element("option", { value: "" }, "all"),
        ...Array.from({ length: answer.shown }, (_, slice) =>
          element("option", { value: `${slice}` }, `${slice}`)));
    }
    this.show(Math.min(Number(byId("time").value), answer.frames - 1));
    if (this.isWanted) { this.isWanted = false; this.play(); }
  }

  // A schedule that plays goes on with that of the next plan.
  clear() {
    const isWanted = this.isWanted || this.isPlaying;
    this.stop();
    this.isWanted = isWanted;
    this.timeline = null;
    byId("time").value = "0";
    byId("slice").replaceChildren();
  }

  toggle() { if (this.isPlaying) this.stop(); else this.play(); }

  play() {
    if (!this.timeline) return;
    this.isPlaying = true;
    byId("play").textContent = "Pause";
    const frames = this.timeline.frames;
    let at = Number(byId("time").value) >= frames - 1 ? 0 : Number(byId("time").value), before = null;
    const step = (now) => {
      if (!this.isPlaying || !this.timeline) return;
      at += before === null ? 0 : (now - before) / PLAY_MS * frames;
      before = now;
      this.show(Math.min(frames - 1, Math.floor(at)));
      if (at >= frames) this.stop(); else requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  stop() { this.isPlaying = this.isWanted = false; byId("play").textContent = "Play"; }

  show(frame) {
    const { timeline } = this;
    byId("time").value = `${frame}`;
    if (!timeline) return;
    const at = timeline.time_s * (frame + 0.5) / timeline.frames;
    const fewer = timeline.shown < timeline.slices
      ? `; shown with ${timeline.shown} of its ${timeline.slices} slices, each larger` : "";
    byId("time-words").textContent = `${timeWords(at)} of ${timeWords(timeline.time_s)}${fewer}`;
    byId("time").setAttribute("aria-valuetext", timeWords(at));
    this.onFrame(frame);
  }
}
