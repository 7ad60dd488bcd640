// How the search of the manual reads words, and the order in which it lists what it finds. The index is made with these options
// (render/render.ts), and the reader's browser searches it with the same ones. JavaScript, because the browser loads this file.

const WORDS = /[\p{L}\p{N}]+/gu;
/** `snake_case`, `kebab-case` and `--flags` of several words. */
const COMPOUNDS = /[\p{L}\p{N}]+(?:[_-][\p{L}\p{N}]+)+/gu;
/** How many letters of a word may be wrong, or which part of them. A shorter word is another word then: "CA", "SSO". */
const wrongLetters = (word) => (word.length < 6 ? Number(word.length > 3) : 0.2);

/** The word, or the same letters with two neighbours swapped. */
const swapped = (word) => ({
  ...{ combineWith: "OR", fuzzy: false, prefix: false },
  queries: Array.from(word.slice(1), (letter, at) => word.slice(0, at) + letter + word[at] + word.slice(at + 2)),
});

/** Of a question, such as "how do I get paid" or "my token was lost". "Without" is none: it turns a question round. */
const SMALL = new Set(
  (
    "a an and are at be been but by can can't did do does don't example for forgot from get happens has have how i is it me my of on " +
    "or our s show that the there this to was we were what when where which who why with you your"
  ).split(" "),
);

const wordsOf = (text) => text.toLowerCase().match(WORDS) ?? [];

/** A plural finds the singular, and the other way round. */
const singular = (word) => (word.length > 3 ? word.replace(/ies$/, "y").replace(/(?<=[^s])s$/, "") : word);

/** "charging" and "charged" find "charge", "stopping" finds "stop", and the other way round. */
function stem(word) {
  const base = singular(word).replace(/ied$/, "y");
  const [, root] = /^(.*[aeiouy].*?)(?:ing|(?<!e)ed)$/.exec(base) ?? [];
  if (root === undefined || root.length < 3) return base.length > 4 ? base.replace(/e$/, "") : base;
  return root.replace(/(?<=...)([bdgmnprt])\1$/, "$1").replace(/(?<=...)e$/, "");
}

/** Each two neighbours of a line in one piece, so that "ratelimit" finds "Rate limits". */
const pairsOf = (line) => wordsOf(line).map((word, at, words) => (at === 0 ? "" : words[at - 1] + word));

/** The words of a text, and its compounds in one piece too. */
function tokenize(text, field) {
  const compounds = (text.match(COMPOUNDS) ?? []).map((found) => wordsOf(found).join(""));
  const pairs = field === "title" || field === "explained" ? text.split("\n").flatMap(pairsOf) : [];
  return [...wordsOf(text), ...compounds, ...pairs];
}

export const OPTIONS = {
  fields: ["title", "page", "words", "explained", "text"],
  storeFields: ["page", "title", "text", "weight"],
  tokenize,
  processTerm: (term) => stem(term.toLowerCase()),
  searchOptions: {
    boost: { title: 8, words: 12, explained: 3, page: 2 },
    prefix: true,
    combineWith: "AND",
    boostDocument: (_id, _term, { weight }) => weight,
  },
};

/** A section that lists the whole question as one of its words is what the reader means. */
const PHRASE_BOOST = { title: 8, words: 60, explained: 3, page: 2 };

/** What a section must have for this word: the compound in one piece, or all of its parts. */
function wordQuery(word) {
  const parts = wordsOf(word);
  if (parts.length === 1) return parts[0];
  // Parts that stand apart count for little: TOLLGATE_PORT is not "the tollgate's port".
  const boost = { title: 2, words: 0.2, explained: 0.2, page: 0.2, text: 0.1 };
  return { combineWith: "OR", queries: [parts.join(""), { combineWith: "AND", queries: parts, boost }] };
}

/** Without the words that say nothing, unless there are no others. */
function wantedOf(words, isEmpty = (word) => SMALL.has(word)) {
  const others = words.filter((word) => !isEmpty(word.toLowerCase()));
  return others.length > 0 ? others : words;
}

/** Each section is about tollgate, so this word finds one only together with the next: "tollgate call". */
const isNameOrSmall = (word) => word === "tollgate" || SMALL.has(word);

const nameOf = (text) => wantedOf(wordsOf(text)).map(singular).join("");

/** Where fewer sections have all words, those that have any of them follow. */
const ENOUGH = 3;

/**
 * The sections with the wanted heading, and then those that have all words, or begin with them, best first. Where there is none:
 * those with words of a similar spelling. Where these are few, those with any of the words follow.
 */
export function find(index, wanted) {
  const words = wanted.split(/\s+/).filter((word) => wordsOf(word).length > 0);
  const queries = wantedOf(words, isNameOrSmall).map(wordQuery);
  const joined = wantedOf(words).length > 1 ? [{ queries: [nameOf(wanted)], boost: PHRASE_BOOST }] : [];
  // A word that a page has, or begins with, is not mistyped: "port" is not "post".
  const isUnknown = (term) => index.search(term).length === 0;
  const fuzzy = { fuzzy: (term) => isUnknown(term) && wrongLetters(term), maxFuzzy: 2 };
  const respelt = queries.map((query) =>
    typeof query === "string" && query.length > 3 && isUnknown(query)
      ? { combineWith: "OR", queries: [query, swapped(query)] }
      : query,
  );
  const all = (each) => ({ combineWith: "OR", queries: [...joined, { combineWith: "AND", queries: each }] });
  const any = { combineWith: "OR", queries };
  for (const [query, options] of [
    [all(queries), {}],
    [all(respelt), fuzzy],
    [{ combineWith: "OR", queries: respelt }, fuzzy],
  ]) {
    const found = index.search(query, options);
    const named = [wordsOf, nameOf].flatMap((spelt) =>
      found.filter(({ title }) => String(spelt(title)) === String(spelt(wanted))),
    );
    const others = found.length > 0 && found.length < ENOUGH ? index.search(any, options) : [];
    const ids = new Map([...named, ...found, ...others].map((hit) => [hit.id, hit]));
    if (found.length > 0) return [...ids.values()];
  }
  return [];
}
