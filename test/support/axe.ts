// What axe finds wrong with a page for people who use it by the keyboard, with a screen reader, or with weak eyes.
import { type AxeResults, source } from "axe-core";
import type { Page } from "playwright-core";

const CONTRAST = "color-contrast";
/** The rule, beside that of contrast, whose outcome depends on how wide the page is. */
const SCROLLING = "scrollable-region-focusable";

/**
 * Runs in the browser: for each way in which text looks (its color, size and weight, and every ground behind it), the first few
 * elements with such a text, since one may lie outside of the window. Axe takes seconds for the thousands of cells of a long page.
 */
const TEXTS = `(() => {
  const grounds = new Map([[null, ""]]);
  const groundOf = (element) => {
    if (!grounds.has(element)) {
      const { backgroundColor, backgroundImage, opacity } = getComputedStyle(element);
      const own = [backgroundColor, backgroundImage, opacity].join(" ");
      grounds.set(element, groundOf(element.parentElement) + (own === "rgba(0, 0, 0, 0) none 1" ? "" : "|" + own));
    }
    return grounds.get(element);
  };
  const looks = new Map();
  for (const element of document.querySelectorAll("body *")) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim() !== "");
    if (!element.checkVisibility() || !(hasText || element.matches("input, select, textarea"))) continue;
    const { color, fontSize, fontWeight } = getComputedStyle(element);
    const look = [element.localName === "a", color, fontSize, fontWeight, groundOf(element)].join("|");
    const alike = looks.get(look) ?? [];
    if (alike.length < 3) looks.set(look, [...alike, element]);
  }
  return [...looks.values()].flat();
})()`;

/** Runs axe in the browser, where its script is put first. */
async function broken(page: Page, context: string, rules: string): Promise<AxeResults["violations"]> {
  if (!(await page.evaluate<boolean>("'axe' in window"))) await page.evaluate(source);
  const options = `{ resultTypes: ["violations"], selectors: false, ${rules} }`;
  return (await page.evaluate<AxeResults>(`axe.run(${context}, ${options})`)).violations;
}

const shown = (violations: AxeResults["violations"]) =>
  violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html.slice(0, 120)).join(" | ")}`);

const paleTexts = (page: Page) => broken(page, `{ include: ${TEXTS} }`, `runOnly: ["${CONTRAST}"]`);

/** The texts that are hard to see in the colors that the page has now. */
export const contrastFindings = async (page: Page): Promise<string[]> => shown(await paleTexts(page));

/** What can be wrong with a page at another width, where nothing was found at the first one. */
export async function widthFindings(page: Page): Promise<string[]> {
  const scrolling = await broken(page, "document", `runOnly: ["${SCROLLING}"]`);
  return shown([...scrolling, ...(await paleTexts(page))]);
}

/** The rules that the page breaks, each with the elements that it is about. */
export async function findings(page: Page, rulesAside: readonly string[] = []): Promise<string[]> {
  const all = await broken(page, "document", `rules: { "${CONTRAST}": { enabled: false } }`);
  return shown([...all, ...(await paleTexts(page))].filter(({ id }) => !rulesAside.includes(id)));
}
