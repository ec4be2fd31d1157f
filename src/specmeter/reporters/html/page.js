"use strict";
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const button = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  name();

  let lit = null;
  function show(mark, x, y) {
    if (lit) lit.classList.remove("on");
    lit = mark;
    tip.textContent = mark ? mark.getAttribute("aria-label") : "";
    if (!mark) return;
    mark.classList.add("on");
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 12, innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(4, Math.min(y + 14, innerHeight - box.height - 8)) + "px";
  }
  function showAtMark(mark) {
    const box = mark.getBoundingClientRect();
    show(mark, box.left + box.width / 2, box.bottom);
  }
  for (const chart of document.querySelectorAll(".chart")) {
    const marks = Array.from(chart.querySelectorAll(".mark"));
    let at = -1;
    chart.addEventListener("pointermove", (event) => {
      const mark = event.target.closest(".mark");
      show(mark, event.clientX, event.clientY);
    });
    chart.addEventListener("pointerleave", () => show(null));
    chart.addEventListener("blur", () => show(null));
    chart.addEventListener("keydown", (event) => {
      if (!marks.length) return;
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step) at = (at + step + marks.length) % marks.length;
      else if (event.key === "Home") at = 0;
      else if (event.key === "End") at = marks.length - 1;
      else if (event.key === "Escape") { show(null); return; }
      else return;
      event.preventDefault();
      showAtMark(marks[at]);
    });
  }
  for (const group of document.querySelectorAll("fieldset[data-panes]")) {
    const panes = Array.from(document.querySelectorAll("[data-pane-of='" + group.dataset.panes + "']"));
    const choose = () => {
      const inputs = Array.from(group.querySelectorAll("input"));
      panes.forEach((pane, i) => { pane.hidden = !inputs[i].checked; });
    };
    group.hidden = false;
    group.addEventListener("change", choose);
    choose();
  }
})();
