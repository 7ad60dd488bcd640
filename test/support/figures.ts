// The figures of the house: what is counted in the source, how much of it there may be at most, and where it stands. The
// numbers may only fall. A feature raises the number of files and lines by its own size, in its own commit. Pure, so that
// the test can try each figure on a planted violation.
import { posix } from "node:path";
import words from "./unused-words.txt" with { type: "text" };

/** Product sources by path from the project's root, tests aside. */
type Sources = ReadonlyMap<string, string>;

export interface Figure {
  readonly what: string;
  readonly most: number;
  /** Each place that counts. */
  find(sources: Sources): readonly string[];
}

const FOLDER_FILES_MAX = 14;
const SLICE_LINES_MAX = 120;

const linesOf = (source: string) => source.split("\n").length - 1;

function matches(pattern: RegExp, isExempt: (path: string) => boolean = () => false) {
  return (sources: Sources): string[] =>
    [...sources].flatMap(([path, source]) => {
      if (isExempt(path)) return [];
      return [...source.matchAll(pattern)].map(([found]) => `${path}: ${found.trim()}`);
    });
}

/** Names that several files declare, with the number of those files. */
function declaredTwice(pattern: RegExp) {
  return (sources: Sources): string[] => {
    const files = new Map<string, Set<string>>();
    for (const [path, source] of sources) {
      for (const [, name = ""] of source.matchAll(pattern)) files.set(name, (files.get(name) ?? new Set()).add(path));
    }
    return [...files].filter(([, paths]) => paths.size > 1).map(([name, paths]) => `${name}: ${[...paths].join(", ")}`);
  };
}

/** Files that only one other file of the folder imports, and that are too short to be an idea of their own. */
function slices(sources: Sources): string[] {
  const importers = new Map<string, Set<string>>();
  for (const [path, source] of sources) {
    for (const [, to = ""] of source.matchAll(/(?:from|import)\s*\(?\s*"(\.[^"]+)"/g)) {
      const target = posix.join(posix.dirname(path), to);
      importers.set(target, (importers.get(target) ?? new Set()).add(path));
    }
  }
  return [...sources].flatMap(([path, source]) => {
    const [only, another] = importers.get(path) ?? [];
    const isSlice = only !== undefined && another === undefined && posix.dirname(only) === posix.dirname(path);
    return isSlice && linesOf(source) < SLICE_LINES_MAX ? [`${path} is imported by ${only} alone`] : [];
  });
}

function fullFolders(sources: Sources): string[] {
  const counts = new Map<string, number>();
  for (const path of sources.keys()) counts.set(posix.dirname(path), (counts.get(posix.dirname(path)) ?? 0) + 1);
  return [...counts]
    .filter(([, count]) => count > FOLDER_FILES_MAX)
    .map(([folder, count]) => `${folder}: ${count} files`);
}

const inKernel = (path: string) => path.startsWith("src/kernel/");

/** What the kernel builds, where fewer than three files use it. */
function rareMechanisms(sources: Sources): string[] {
  const kernel = [...sources].filter(([path]) => inKernel(path));
  const made = kernel.flatMap(([path, source]) =>
    [...source.matchAll(/^export (?:function (create\w+)|class (\w+))/gm)].map(([, maker, type]) => ({
      name: maker ?? type ?? "",
      file: posix.basename(path),
    })),
  );
  return made.flatMap(({ name, file }) => {
    const imports = new RegExp(`import[^;]*\\b${name}\\b[^;]*from "[^"]*/${RegExp.escape(file)}"`);
    const users = [...sources].filter(([, source]) => imports.test(source)).map(([path]) => path);
    return users.length < 3 ? [`${name} is used by ${users.join(", ")}`] : [];
  });
}

/** Words of a glossary that no name in the code holds, however it is written (`FairShare`, `fair_share`). */
export function unspokenWords(glossary: string, sources: Sources): string[] {
  const code = [...sources.values()].join("\n").replace(/\/\/.*|\/\*[\s\S]*?\*\//g, "");
  const names = new Set(code.match(/[A-Za-z_]\w*/g));
  const spoken = [...names]
    .map(
      (name) =>
        ` ${name
          .replace(/([a-z0-9])([A-Z])/g, "$1 $2")
          .replaceAll("_", " ")
          .toLowerCase()} `,
    )
    .join("|");
  const words = [...glossary.matchAll(/^\| ([^|]+) \| [^|-]/gm)].flatMap(([, named = ""]) => named.split(", "));
  return words.filter((word) => word !== "word" && !new RegExp(` ${word.toLowerCase()}(s|es)? `).test(spoken));
}

const unusedWords = words.split("\n").filter((line) => line !== "" && !line.startsWith("#"));

export const FIGURES: readonly Figure[] = [
  { what: "product files", most: 234, find: (sources) => [...sources.keys()] },
  {
    what: "product lines",
    most: 46_995,
    find: (sources) => [...sources.values()].flatMap((source) => source.match(/\n/g) ?? []),
  },
  {
    what: "files in the kernel",
    most: 10,
    find: (sources) => [...sources.keys()].filter((path) => path.startsWith("src/kernel/")),
  },
  {
    what: "imports of turns and slices, where work on many bytes stays on the main loop",
    most: 16,
    find: matches(/\b(?:inTurn|eachInTurns|inSlices)\b(?=[^;(]*from ")/g, inKernel),
  },
  { what: "mechanisms of the kernel with fewer than three users", most: 7, find: rareMechanisms },
  {
    what: "kinds of rows that say whether a process lives",
    most: 1,
    find: matches(/\blease_until: c\./g),
  },
  { what: "short files with one importer in the same folder", most: 3, find: slices },
  { what: `folders with more than ${FOLDER_FILES_MAX} files`, most: 0, find: fullFolders },
  {
    what: "type names that several files declare",
    most: 0,
    find: declaredTwice(/^(?:export )?(?:interface|type|class) ([A-Z]\w*)/gm),
  },
  {
    what: "exported functions that several files declare",
    most: 0,
    find: declaredTwice(/^export (?:async )?function (\w+)/gm),
  },
  { what: "values that may be promises", most: 0, find: matches(/\b(MaybePromise|andThen)\b/g) },
  {
    what: "questions for the database's kind outside storage",
    most: 0,
    find: matches(/\.dialect\b/g, (path) => /^(src\/storage|db)\//.test(path)),
  },
  {
    what: "bounds outside kernel/limits.ts",
    most: 131,
    find: matches(/^(?:export )?const [A-Z][A-Z0-9_]*_(?:MAX|MS|MIN)\b/gm, (path) => path === "src/kernel/limits.ts"),
  },
  {
    what: "comments that can't be read alone",
    most: 0,
    find: matches(/(?:^|\n)\s*(?:\/\/|\/\*\*|\*)\s+(?:The same|Of (?:those|what|none|that|these|which))\b[^\n]*/g),
  },
  { what: "words that we don't use", most: 0, find: matches(new RegExp(`\\b(?:${unusedWords.join("|")})\\b`, "gi")) },
];
