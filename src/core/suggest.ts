// "Did you mean": the known word nearest to a mistyped one. Command line and configuration both use it.

const DISTANCE_MAX = 2;

/** The nearest of `words` by edit distance (Levenshtein), or null when none is within two edits. */
export function suggest(word: string, words: Iterable<string>): string | null {
  let best: string | null = null;
  let bestDistance = DISTANCE_MAX + 1;
  for (const candidate of words) {
    const distance = editDistance(word, candidate);
    if (distance < bestDistance) [best, bestDistance] = [candidate, distance];
  }
  return best;
}

function editDistance(from: string, to: string): number {
  if (Math.abs(from.length - to.length) > DISTANCE_MAX) return DISTANCE_MAX + 1;
  let row = Array.from({ length: to.length + 1 }, (_, column) => column);
  for (const [line, character] of [...from].entries()) {
    const next = [line + 1];
    for (let column = 1; column <= to.length; column++) {
      const change = (row[column - 1] ?? 0) + (to[column - 1] === character ? 0 : 1);
      next.push(Math.min(change, (row[column] ?? 0) + 1, (next[column - 1] ?? 0) + 1));
    }
    row = next;
  }
  return row[to.length] ?? 0;
}
