// What axe finds wrong with a page for people who use it by the keyboard, with a screen reader, or with weak eyes.
import { type AxeResults, source } from "axe-core";
import type { Page } from "playwright-core";

/** The rules that the page breaks, each with the elements that it is about. */
export async function findings(page: Page, rulesAside: readonly string[] = []): Promise<string[]> {
  await page.evaluate(source);
  // It runs in the browser, where the script above has put `axe`.
  const { violations } = await page.evaluate<AxeResults>("axe.run({ resultTypes: ['violations'] })");
  const counted = violations.filter(({ id }) => !rulesAside.includes(id));
  return counted.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html.slice(0, 120)).join(" | ")}`);
}
