"use strict";
// The report's page: charts, the tooltip, buttons that copy, the place in the contents.

const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");

function say(text, x, y) {
  tip.classList.toggle("on", Boolean(text));
  if (!text) return;
  tip.textContent = text;
  const left = x + 16 + tip.offsetWidth > innerWidth ? x - tip.offsetWidth - 16 : x + 16;
  const top = Math.min(y + 12, innerHeight - tip.offsetHeight - 8);
  tip.style.transform = `translate(${Math.max(6, left)}px, ${Math.max(6, top)}px)`;
}

data.charts.forEach((spec, number) => {
  const box = document.getElementById(`chart-${number}`);
  if (box) vortChart.chart(box, spec, say);
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.(".copy");
  if (!button) return;
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "copied";
  } catch {
    getSelection().selectAllChildren(code);
    button.textContent = "selected";
  }
  setTimeout(() => { button.textContent = "copy"; }, 1600);
});

const links = new Map([...document.querySelectorAll(".contents a")].map((a) => [a.hash.slice(1), a]));
const watch = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    for (const link of links.values()) link.removeAttribute("aria-current");
    links.get(entry.target.id)?.setAttribute("aria-current", "true");
  }
}, { rootMargin: "-20% 0px -70% 0px" });
for (const section of document.querySelectorAll(".experiment")) watch.observe(section);
document.body.dataset.ready = "yes";
