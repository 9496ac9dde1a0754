// Time to first token of requests with long prompts, by the time at which they ended. Warm: at least half was restored.

const HEIGHT = 200, LEFT = 54, RIGHT = 12, TOP = 12, BOTTOM = 26;

function drawTtft(box, ended) {
  const points = ended
    .filter(({ outcome, timings }) => ["hit", "miss"].includes(outcome) && timings.ttft_ms > 0)
    .map((request) => ({ at: request.ended_at, s: request.timings.ttft_ms / 1000, warm: request.outcome === "hit", request }));
  find("#times").hidden = !points.length;
  if (!points.length) return;
  const width = Math.max(280, box.clientWidth);
  const [x, ticksX] = timeScale(points, width);
  const [y, ticksY] = logScale(points);
  const medians = [false, true].map((warm) => median(points.filter((p) => p.warm === warm).map((p) => p.s)));
  const svg = make("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": ttftLabel(points, medians) });
  for (const [value, label] of ticksY) {
    svg.append(make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(make("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, label));
  }
  for (const [value, label, anchor] of ticksX)
    svg.append(make("text", { x: x(value), y: HEIGHT - 7, "text-anchor": anchor }, label));
  medians.forEach((value, warm) => {
    if (value !== null) svg.append(make("line", { class: `median ${warm ? "warm" : "cold"}`, x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
  });
  for (const point of points) svg.append(markOf(point, x(point.at), y(point.s)));
  box.replaceChildren(svg);
}

function markOf(point, x, y) {
  const prompt = plural(point.request.prompt_tokens, "prompt token");
  const title = make("title", {}, `${seconds(point.s)} · ${prompt}, ${count(point.request.prefix_cache.restored)} restored`);
  if (point.warm) return make("circle", { class: "warm", cx: x, cy: y, r: 4.5 }, title);
  return make("rect", { class: "cold", x: x - 4, y: y - 4, width: 8, height: 8 }, title);
}

function ttftLabel(points, [cold, warm]) {
  const parts = [`Time to first token of ${plural(points.length, "request")}.`];
  if (cold !== null) parts.push(`Median with less than half restored: ${seconds(cold)}.`);
  if (warm !== null) parts.push(`Median with at least half restored: ${seconds(warm)}.`);
  return parts.join(" ");
}

function timeScale(points, width) {
  const first = points[0].at, last = Math.max(points[points.length - 1].at, first + 10);
  const scale = (at) => LEFT + 10 + ((at - first) / (last - first)) * (width - LEFT - RIGHT - 20);
  const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB", last - first > 600 ? { hour: "2-digit", minute: "2-digit" } : {});
  const middle = (first + last) / 2;
  return [scale, [[first, clock(first), "start"], [middle, clock(middle), "middle"], [last, clock(last), "end"]]];
}

function logScale(points) {
  const all = points.map((point) => point.s);
  const low = Math.floor(Math.log10(Math.min(...all)) * 2 - 0.2) / 2, high = Math.ceil(Math.log10(Math.max(...all)) * 2 + 0.2) / 2;
  const scale = (s) => TOP + ((high - Math.log10(s)) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power++)
    for (const digit of high - low > 2 ? [1] : [1, 3]) {
      const value = digit * 10 ** power;
      if (Math.log10(value) >= low && Math.log10(value) <= high) ticks.push([value, value < 1 ? `${+(value * 1000).toPrecision(1)} ms` : `${value} s`]);
    }
  return [scale, ticks];
}
