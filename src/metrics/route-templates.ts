// Which route a path belongs to, for a label: as many values as there are routes, whatever is asked for.
import { pathPattern } from "../http/elysia.ts";

/** Of all paths that belong to no route. */
export const OTHER_ROUTE = "other";

export function createRouteTemplates(routes: readonly { readonly path: string }[]) {
  const paths = [...new Set(routes.map(({ path }) => path))];
  const exact = new Map<string, string>();
  /** Those with parameters, by how many segments their paths have; of unknown length below -1. */
  const byLength = new Map<number, { readonly pattern: RegExp; readonly template: string }[]>();
  for (const path of paths) {
    const template = path.replaceAll(/:(\w+)/g, "{$1}");
    if (template === path && !path.endsWith("*")) exact.set(path, path);
    else {
      const length = path.endsWith("*") ? -1 : slashesIn(path);
      byLength.set(length, [...(byLength.get(length) ?? []), { pattern: pathPattern(path), template }]);
    }
  }

  function among(length: number, path: string): string | undefined {
    return byLength.get(length)?.find(({ pattern }) => pattern.test(path))?.template;
  }

  return {
    all: [...paths.map((path) => path.replaceAll(/:(\w+)/g, "{$1}")), OTHER_ROUTE],
    of: (path: string): string => exact.get(path) ?? among(slashesIn(path), path) ?? among(-1, path) ?? OTHER_ROUTE,
  };
}

function slashesIn(path: string): number {
  let count = 0;
  for (let at = path.indexOf("/"); at !== -1; at = path.indexOf("/", at + 1)) count++;
  return count;
}
