// The search of the manual in the reader's browser. "/" leads to its field, arrows to the results, Enter opens, Escape ends it.
const SHOWN_MAX = 12;
const AROUND = 60;

const field = document.getElementById("search");
const found = document.getElementById("found");
/** Read out by screen readers when its text changes. */
const said = document.getElementById("said");
/** The site's folder: this script stands in it, wherever the page does. */
const site = new URL(".", document.currentScript.src);

let loading = null;

/** The index, loaded when the field is first used. A failure is forgotten, so that the next key tries again. */
function loadedIndex() {
  loading ??= Promise.all([
    import(new URL("minisearch.js", site)),
    import(new URL("find.js", site)),
    fetch(new URL("search.json", site)).then((answer) => answer.json()),
  ])
    .then(([{ default: MiniSearch }, { find, OPTIONS }, index]) => {
      const loaded = MiniSearch.loadJS(index, OPTIONS);
      return (wanted) => find(loaded, wanted).slice(0, SHOWN_MAX);
    })
    .catch(() => {
      loading = null;
      return null;
    });
  return loading;
}

/** The text around the first word that was found, with every found word marked. */
function excerptOf({ text, terms }) {
  const words = terms.map((term) => term.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).sort((a, b) => b.length - a.length);
  // The index has words without their endings.
  const pattern = new RegExp(`((?:${words.join("|")})(?:e[sd]?|s|ing)?)`, "gi");
  const at = Math.max(0, text.search(pattern));
  // From one blank to another, so that no word is cut.
  const start = at < AROUND ? 0 : text.lastIndexOf(" ", at - AROUND) + 1;
  const blank = text.indexOf(" ", at + AROUND * 2);
  const end = blank === -1 ? text.length : blank;
  const excerpt = document.createElement("span");
  excerpt.append(start > 0 ? "…" : "");
  for (const [position, part] of text.slice(start, end).split(pattern).entries()) {
    const mark = document.createElement("mark");
    mark.textContent = part;
    // Splitting by a pattern with a group puts what it found at the odd positions.
    excerpt.append(position % 2 === 1 ? mark : part);
  }
  excerpt.append(end < text.length ? "…" : "");
  return excerpt;
}

function itemOf(hit) {
  const link = document.createElement("a");
  link.href = new URL(hit.id, site).href;
  const title = document.createElement("b");
  title.textContent = hit.title === hit.page ? hit.title : `${hit.page}: ${hit.title}`;
  link.append(title, excerptOf(hit));
  link.addEventListener("click", close);
  const item = document.createElement("li");
  item.append(link);
  return item;
}

function close() {
  field.value = "";
  found.hidden = true;
  said.textContent = "";
}

function noneItem(text) {
  const item = document.createElement("li");
  item.className = "none";
  item.textContent = text;
  return item;
}

async function search() {
  const wanted = field.value.trim();
  const hitsOf = wanted === "" ? null : await loadedIndex();
  if (field.value.trim() !== wanted) return;
  const items = hitsOf === null ? [] : hitsOf(wanted).map(itemOf);
  const none =
    hitsOf === null ? "The search could not be loaded" : `Nothing in the manual has “${wanted}”. Try another word.`;
  found.replaceChildren(...(items.length === 0 ? [noneItem(none)] : items));
  found.hidden = wanted === "";
  if (wanted === "") said.textContent = "";
  else said.textContent = items.length === 0 ? none : `${items.length} result${items.length === 1 ? "" : "s"}`;
}

/** From the field down into the results, and back up into the field. */
function move(event, step) {
  const stops = [field, ...found.querySelectorAll("a")];
  const next = stops[stops.indexOf(document.activeElement) + step];
  if (next === undefined) return;
  event.preventDefault();
  next.focus();
}

document.addEventListener("keydown", (event) => {
  const isInside = event.target === field || found.contains(event.target);
  if (event.key === "/" && event.target !== field && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    field.focus();
  } else if (event.key === "Escape" && isInside) {
    close();
    field.focus();
  } else if (event.key === "Enter" && event.target === field) {
    found.querySelector("a")?.click();
  } else if (event.key === "ArrowDown" && isInside && !found.hidden) {
    move(event, 1);
  } else if (event.key === "ArrowUp" && isInside) {
    move(event, -1);
  }
});
field.addEventListener("focus", loadedIndex);
field.addEventListener("focus", search);
field.addEventListener("input", search);
const box = field.closest("[role=search]");
box.hidden = false;
/** Results that the reader has turned away from would cover the page. */
function leave({ target }) {
  if (!box.contains(target)) found.hidden = true;
}
document.addEventListener("focusin", leave);
document.addEventListener("pointerdown", leave);
