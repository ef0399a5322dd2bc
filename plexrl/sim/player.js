"use strict";
// Plays a simulated run back. Data: {runs: [{name, end, lanes: [[label, gpus]], jobs, gangs, bars, marks}]}, see page.py.
(() => {
  const data = JSON.parse(document.getElementById("runs").textContent);
  const el = (id) => document.getElementById(id);
  const KINDS = ["busy", "switch", "kept", "startup", "drain", "idle"];
  const SPANS = { all: 0, day: 86400, hours: 14400, hour: 3600, minutes: 600, minute: 60 };
  const board = el("gpus"), line = el("timeline"), scrub = el("scrub");
  const LABEL = 150;
  let run, at = 0, playing = false, last = 0, colours;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const readColours = () => {
    colours = { text: colour("--text"), dim: colour("--dim"), lane: colour("--lane"), edge: colour("--edge"),
      cut: colour("--cut"), jobs: [0, 1, 2, 3, 4, 5, 6, 7].map((i) => colour("--c" + i)) };
  };
  const clock = (s) => {
    const two = (n) => String(Math.floor(n)).padStart(2, "0");
    const days = Math.floor(s / 86400);
    return (days ? days + " d " : "") + two((s / 3600) % 24) + ":" + two((s / 60) % 60) + ":" + two(s % 60);
  };
  const hatch = (context) => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.strokeStyle = colours.cut;
    pen.lineWidth = 2;
    pen.beginPath();
    for (const x of [-3, 3, 9]) { pen.moveTo(x, 6); pen.lineTo(x + 6, 0); }
    pen.stroke();
    return context.createPattern(tile, "repeat");
  };

  // The bar of a lane at a time, or null; bars are [begin, end, kind, job], in order, and what lies between is idle.
  const barAt = (bars, time) => {
    let low = 0, high = bars.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (bars[middle][1] <= time) low = middle + 1;
      else if (bars[middle][0] > time) high = middle - 1;
      else return bars[middle];
    }
    return null;
  };
  const sized = (canvas, height) => {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    return [pen, width];
  };
  const paint = (pen, bar, x, y, width, height, stripes) => {
    const kind = KINDS[bar[2]];
    if (kind === "idle") return;
    pen.globalAlpha = kind === "kept" ? 0.3 : 1;
    pen.fillStyle = bar[3] < 0 ? colours.edge : colours.jobs[bar[3] % 8];
    pen.fillRect(x, y, width, height);
    pen.globalAlpha = 1;
    if (kind !== "busy" && kind !== "kept") {
      pen.fillStyle = stripes;
      pen.fillRect(x, y, width, height);
    }
  };
  const view = () => {
    const span = SPANS[el("span").value] || run.end;
    if (span >= run.end) return [0, run.end];
    const begin = Math.min(Math.max(0, at - span / 2), run.end - span);
    return [begin, begin + span];
  };
  const drawTimeline = () => {
    const lane = run.lanes.length > 40 ? 9 : 20, gap = lane > 10 ? 4 : 1;
    const [pen, width] = sized(line, run.lanes.length * (lane + gap) + 22);
    const [from, to] = view(), scale = (width - LABEL) / (to - from), stripes = hatch(pen);
    pen.font = (lane > 10 ? 12 : 8) + "px system-ui, sans-serif";
    pen.textBaseline = "middle";
    run.lanes.forEach(([label], row) => {
      const y = row * (lane + gap);
      pen.fillStyle = colours.dim;
      pen.fillText(label, 0, y + lane / 2, LABEL - 8);
      pen.fillStyle = colours.lane;
      pen.fillRect(LABEL, y, width - LABEL, lane);
      for (const bar of run.bars[row]) {
        if (bar[1] <= from || bar[0] >= to) continue;
        const x = LABEL + (Math.max(bar[0], from) - from) * scale;
        paint(pen, bar, x, y, Math.max(0.4, (Math.min(bar[1], to) - Math.max(bar[0], from)) * scale), lane, stripes);
      }
    });
    const bottom = run.lanes.length * (lane + gap);
    pen.fillStyle = colours.dim;
    pen.font = "11px system-ui, sans-serif";
    for (let tick = 0; tick <= 5; tick++) {
      const x = LABEL + ((width - LABEL) * tick) / 5;
      pen.textAlign = tick === 5 ? "right" : "center";
      pen.fillText(clock(from + ((to - from) * tick) / 5), x, bottom + 12);
    }
    pen.textAlign = "left";
    pen.fillStyle = colours.text;
    pen.fillRect(LABEL + (at - from) * scale - 1, 0, 2, bottom);
  };
  const drawBoard = () => {
    const side = run.gpus > 200 ? 9 : 18;
    const across = Math.max(1, Math.floor(board.clientWidth / (side + 3)));
    const [pen] = sized(board, Math.ceil(run.gpus / across) * (side + 3));
    const stripes = hatch(pen), sums = {};
    let place = 0;
    run.lanes.forEach(([, gpus], row) => {
      const bar = barAt(run.bars[row], at), kind = bar ? KINDS[bar[2]] : "idle";
      sums[kind] = (sums[kind] || 0) + gpus;
      for (let i = 0; i < gpus; i++, place++) {
        const x = (place % across) * (side + 3), y = Math.floor(place / across) * (side + 3);
        pen.fillStyle = colours.lane;
        pen.fillRect(x, y, side, side);
        if (bar) paint(pen, bar, x, y, side, side, stripes);
      }
    });
    return KINDS.filter((kind) => sums[kind]).map((kind) => sums[kind] + " " + kind).join(", ");
  };
  // The first mark after a time; marks are [at, gang, 1 when the turn ended, reason].
  const markAfter = (time) => {
    let low = 0, high = run.marks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (run.marks[middle][0] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  const listTurns = () => {
    const next = markAfter(at), list = el("turns");
    list.replaceChildren();
    for (let i = Math.max(0, next - 6); i < Math.min(run.marks.length, next + 3); i++) {
      const [when, gang, ended, reason] = run.marks[i], item = document.createElement("li");
      item.textContent = clock(when) + "  " + run.gangs[gang] + (ended ? " ends: " : " begins: ") + run.reasons[reason];
      if (i === next - 1) item.className = "now";
      list.append(item);
    }
  };
  const draw = () => {
    scrub.value = String(at);
    scrub.setAttribute("aria-valuetext", clock(at));
    el("clock").textContent = clock(at) + " / " + clock(run.end);
    drawTimeline();
    el("sums").textContent = "GPUs: " + drawBoard();
    listTurns();
  };
  const stop = () => {
    playing = false;
    el("play").textContent = "Play";
    el("sums").setAttribute("aria-live", "polite");
  };
  const tick = (now) => {
    if (!playing) return;
    at += ((now - last) / 1000) * (run.end / 60) * Number(el("speed").value);
    last = now;
    if (at >= run.end) { at = run.end; stop(); }
    draw();
    requestAnimationFrame(tick);
  };
  const jump = (forward) => {
    stop();
    const next = markAfter(at);
    let i = forward ? next : next - 1;
    while (!forward && i >= 0 && run.marks[i][0] >= at) i--;
    at = i < 0 ? 0 : i >= run.marks.length ? run.end : run.marks[i][0];
    draw();
  };
  const choose = (number) => {
    stop();
    run = data.runs[number];
    at = 0;
    scrub.max = String(run.end);
    scrub.step = String(run.end / 2000);
    const legend = el("jobs");
    legend.replaceChildren();
    run.jobs.slice(0, 24).forEach((name, i) => {
      const item = document.createElement("span"), key = document.createElement("i");
      key.className = "key c" + (i % 8);
      item.append(key, name);
      legend.append(item);
    });
    if (run.jobs.length > 24) legend.append("and " + (run.jobs.length - 24) + " more");
    draw();
  };

  readColours();
  el("play").addEventListener("click", () => {
    if (playing) { stop(); return draw(); }
    if (at >= run.end) at = 0;
    playing = true;
    last = performance.now();
    el("play").textContent = "Pause";
    el("sums").setAttribute("aria-live", "off");
    requestAnimationFrame(tick);
  });
  el("next").addEventListener("click", () => jump(true));
  el("previous").addEventListener("click", () => jump(false));
  el("span").addEventListener("change", draw);
  scrub.addEventListener("input", () => { at = Number(scrub.value); draw(); });
  line.addEventListener("click", (event) => {
    const [from, to] = view(), box = line.getBoundingClientRect();
    at = Math.min(run.end, Math.max(0, from + ((event.clientX - box.left - LABEL) / (box.width - LABEL)) * (to - from)));
    draw();
  });
  line.addEventListener("mousemove", (event) => {
    const box = line.getBoundingClientRect(), [from, to] = view();
    const row = Math.floor(((event.clientY - box.top) / (box.height - 22)) * run.lanes.length);
    const time = from + ((event.clientX - box.left - LABEL) / (box.width - LABEL)) * (to - from);
    const bar = run.bars[row] && time >= from ? barAt(run.bars[row], time) : null;
    line.title = bar ? run.lanes[row][0] + ": " + KINDS[bar[2]] + (bar[3] < 0 ? "" : " " + run.jobs[bar[3]]) + ", " +
      clock(bar[0]) + " to " + clock(bar[1]) : "";
  });
  const pick = el("run");
  if (pick) pick.addEventListener("change", () => choose(Number(pick.value)));
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });
  choose(0);
})();
