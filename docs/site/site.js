// Tables at any width: as they are where every column has room, else each row as a block with the headings beside its cells.
(() => {
  const MANY_COLUMNS = 14, SHORT_CELL = 22;

  const label = table => {
    const heads = [...table.querySelectorAll("thead th")];
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, column) => {
        cell.dataset.label = heads[column]?.textContent ?? "";
        const box = document.createElement("div"); // beside its label, when the table is stacked
        box.append(...cell.childNodes);
        cell.append(box);
        cell.toggleAttribute("data-short", cell.textContent.length <= SHORT_CELL);
      });
    }
  };

  const fit = table => {
    const space = table.closest(".md-typeset").clientWidth;
    table.removeAttribute("data-stacked");
    table.style.cssText = "display: table; width: 0"; // then its width is the least that its columns need
    const least = table.offsetWidth;
    table.style.cssText = "";
    const scrolls = least > space && table.rows[0].cells.length > MANY_COLUMNS;
    table.closest(".md-typeset__table")?.toggleAttribute("data-scrolls", scrolls);
    table.toggleAttribute("data-stacked", least > space && !scrolls);
  };

  addEventListener("load", () => {
    const tables = [...document.querySelectorAll(".md-content .md-typeset table")].filter(table => table.tHead);
    tables.forEach(label);
    for (const code of document.querySelectorAll(".md-content :not(pre) > code")) { // no line ends within --flags
      code.toggleAttribute("data-short", code.textContent.length <= SHORT_CELL);
    }
    const all = () => tables.forEach(fit);
    new ResizeObserver(all).observe(document.querySelector(".md-content"));
    document.querySelectorAll(".tabbed-set input, details").forEach(one => one.addEventListener("change", all));
    all();
  });
})();
