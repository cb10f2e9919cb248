// What is wrong with the page that is open, at its width and in its colours. Each check returns sentences.
globalThis.checks = (() => {
  const LEAST_CONTRAST = 4.5, PIXEL = 1, FEW_WORDS = 5;

  const start = text => `“${text.trim().replace(/\s+/g, " ").slice(0, 50)}”`;
  const named = element => `${element.tagName.toLowerCase()} ${start(element.textContent)}`;
  const has_text = element => [...element.childNodes].some(node => node.nodeType === 3 && /[\p{L}\p{N}]/u.test(node.textContent));
  const ancestors = function* (element) { for (let one = element; one; one = one.parentElement) yield one; };
  const picture_of = text => [...ancestors(text)].findLast(one => one instanceof SVGSVGElement);
  const is_shown = element => element.checkVisibility({opacityProperty: true, visibilityProperty: true});
  const settled = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));

  // All that a click would open is open, and nothing moves.
  const open = () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
    for (const tab of document.querySelectorAll(".tabbed-set > input")) { tab.removeAttribute("name"); tab.checked = true; }
    const still = document.createElementNS(document.documentElement.namespaceURI, "style");
    still.textContent = "* { transition: none !important; animation: none !important; }";
    document.documentElement.append(still);
  };

  // --- overflow ---------------------------------------------------------------------------------------------------

  // Why a part of an element can't be seen, or only when it is scrolled; "" if all of it can.
  const cut = (element, may_scroll) => {
    const box = element.getBoundingClientRect(), right = box.left + Math.max(box.width, element.scrollWidth);
    for (const one of ancestors(element)) {
      if (one === document.body || one === document.documentElement) break;
      const overflow = getComputedStyle(one).overflowX, edge = one.getBoundingClientRect().right + PIXEL;
      if (["auto", "scroll"].includes(overflow)) {
        const hidden = one.scrollWidth - one.clientWidth;
        return hidden > PIXEL && !may_scroll ? `scrolls, ${one.scrollWidth} px in ${one.clientWidth}` : "";
      }
      if (overflow !== "visible" && one !== element && right > edge) return `is cut at ${edge | 0} px of ${right | 0}`;
    }
    const width = document.documentElement.clientWidth;
    return right > width + PIXEL ? `is cut at ${width} px of ${right | 0}` : "";
  };

  const is_squeezed = cell => {
    const words = cell.textContent.match(/\w{2,}/g)?.length ?? 0, style = getComputedStyle(cell), inside = document.createRange();
    inside.selectNodeContents(cell); // the cell itself is as high as its row
    const lines = inside.getBoundingClientRect().height / (parseFloat(style.lineHeight) || 1.2 * parseFloat(style.fontSize));
    return words > FEW_WORDS && cell.querySelector("br, p, ul, ol, pre, svg, img") === null && lines > words - .5;
  };

  const layout = async ignored => {
    await settled();
    const is_looked_at = element => is_shown(element) && !(ignored && element.closest(ignored));
    const found = [], root = document.documentElement;
    const is_page = root instanceof HTMLElement; // a picture by itself is as wide as it is
    if (is_page && root.scrollWidth > root.clientWidth) found.push(`the page is ${root.scrollWidth} px wide, not ${root.clientWidth}`);
    for (const element of document.querySelectorAll("table, pre")) {
      const how = is_looked_at(element) && cut(element, element.tagName === "PRE");
      if (how) found.push(`${named(element)} ${how}`);
    }
    for (const cell of document.querySelectorAll("td")) {
      if (is_looked_at(cell) && is_squeezed(cell)) found.push(`${named(cell)} has a word a line`);
    }
    for (const text of document.querySelectorAll("svg text")) {
      const {left, right} = text.getBoundingClientRect(), picture = picture_of(text), frame = picture.getBoundingClientRect();
      const is_over = left < frame.left - PIXEL || right > frame.right + PIXEL;
      if (is_looked_at(text) && is_over && getComputedStyle(picture).overflow === "hidden") found.push(`${named(text)} is cut`);
    }
    return found;
  };

  // --- contrast ---------------------------------------------------------------------------------------------------

  const painter = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const colours = new Map();
  // A colour of CSS as red, green, blue of 255 and alpha of 1; null if it is none, as a pattern.
  const parsed = text => {
    if (!colours.has(text)) {
      painter.clearRect(0, 0, 1, 1);
      painter.fillStyle = text;
      painter.fillRect(0, 0, 1, 1);
      const [red, green, blue, alpha] = painter.getImageData(0, 0, 1, 1).data;
      colours.set(text, CSS.supports("color", text) ? [red, green, blue, alpha / 255] : null);
    }
    return colours.get(text);
  };
  const over = (below, [red, green, blue, alpha], opacity = 1) =>
    [red, green, blue].map((value, channel) => value * alpha * opacity + below[channel] * (1 - alpha * opacity));
  const luminance = colour => {
    const [red, green, blue] = colour.map(value => value / 255 <= .04045 ? value / 3294.6 : ((value / 255 + .055) / 1.055) ** 2.4);
    return .2126 * red + .7152 * green + .0722 * blue;
  };
  const contrast_of = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + .05) / (dark + .05);
  };
  const opacity_of = element => [...ancestors(element)].reduce((all, one) => all * getComputedStyle(one).opacity, 1);

  const contrast = async ignored => {
    await settled();
    const found = new Map(), grounds = new Map();
    const page = document.createElementNS("http://www.w3.org/1999/xhtml", "i");
    page.style.color = "Canvas"; // what a browser paints where a page paints nothing
    document.documentElement.append(page);
    const empty = parsed(getComputedStyle(page).color).slice(0, 3);
    page.remove();

    const ground = element => {
      if (element === null) return empty;
      if (!grounds.has(element)) grounds.set(element, over(ground(element.parentElement), parsed(getComputedStyle(element).backgroundColor)));
      return grounds.get(element);
    };

    // What a picture has painted at the middle of one of its texts before the text.
    const shapes = new Map();
    const painted = text => {
      const picture = picture_of(text), box = text.getBoundingClientRect();
      if (!shapes.has(picture)) {
        const all = [...picture.querySelectorAll("rect, path, circle, ellipse, polygon")].filter(shape => !shape.closest("defs, clipPath, mask"));
        shapes.set(picture, all.map(shape => [shape, shape.getBoundingClientRect()]));
      }
      const x = box.x + box.width / 2, y = box.y + box.height / 2;
      let below = ground(picture);
      for (const [shape, {left, right, top, bottom}] of shapes.get(picture)) {
        if (left > x || right < x || top > y || bottom < y || !(shape.compareDocumentPosition(text) & 4)) continue;
        const style = getComputedStyle(shape), fill = style.fill === "none" ? null : parsed(style.fill);
        const at = new DOMPoint(x, y).matrixTransform(shape.getScreenCTM().inverse());
        if (fill && is_shown(shape) && shape.isPointInFill(at)) below = over(below, fill, style.fillOpacity * opacity_of(shape));
      }
      return below;
    };

    const look = (text, colour, below, opacity) => {
      const key = `${colour} ${below.map(Math.round)} ${opacity}`;
      if (found.has(key)) return;
      const ratio = contrast_of(over(below, parsed(colour), opacity), below);
      found.set(key, ratio < LEAST_CONTRAST ? `${start(text)} has contrast ${ratio.toFixed(2)}: ${colour} on ${below.map(Math.round)}` : "");
    };

    for (const element of document.querySelectorAll("*")) {
      if (!is_shown(element) || (ignored && element.closest(ignored))) continue;
      const own = has_text(element), box = own && element.getBoundingClientRect();
      if (own && box.width && box.height) {
        const style = getComputedStyle(element), drawn = element instanceof SVGTextContentElement;
        if (drawn) look(element.textContent, style.fill, painted(element), style.fillOpacity * opacity_of(element));
        else if (!(element instanceof SVGElement)) look(element.textContent, style.color, ground(element), opacity_of(element));
      }
      for (const part of ["::before", "::after"]) {
        const style = getComputedStyle(element, part), text = /^"(.*\w.*)"$/.exec(style.content);
        if (text && style.display !== "none") look(text[1], style.color, over(ground(element), parsed(style.backgroundColor)), opacity_of(element) * style.opacity);
      }
    }
    return [...found.values()].filter(Boolean);
  };

  // --- links ------------------------------------------------------------------------------------------------------

  const links = () => ({
    links: [...new Set([...document.querySelectorAll("a[href]")].map(link => link.href.baseVal ?? link.href))],
    anchors: [...document.querySelectorAll("[id], [name]")].flatMap(one => [one.id, one.getAttribute("name")]).filter(Boolean),
  });

  return {open, layout, contrast, links};
})();
