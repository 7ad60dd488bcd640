// The licences of everything that a binary holds, in one text file that goes with it. The licences of most packages ask for
// that, and so does the one of the engine in Bun.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { ROOT } from "./build.ts";
import { type BundledPackage, licenceTexts } from "./bundled.ts";

/** What may be passed on in a binary, with the text beside it and nothing else to do. */
const ALLOWED = new Set(["MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "0BSD"]);
const OWN = "Apache-2.0";

const RULE = `\n\n${"-".repeat(80)}\n\n`;

/** @throws when a package has a licence that nobody has looked at yet, or has to come with a text and has none */
export function licencesFile(packages: readonly BundledPackage[], bunVersion: string): string {
  const own = readFileSync(join(ROOT, "LICENSE"), "utf8").trim();
  const bun = readFileSync(join(ROOT, "src/packaging/bun-licence.txt"), "utf8").trim();
  const parts = packages.map((each) => {
    const { name, version, license } = each.manifest;
    if (license === undefined || !ALLOWED.has(license)) throw new Error(`${name} has the licence ${license}`);
    const texts = licenceTexts(each);
    if (texts.length === 0 && license !== OWN) throw new Error(`${name} comes without the text of its licence`);
    const text = texts.length === 0 ? `${OWN}, whose text stands at the top.` : texts.join("\n\n");
    return `${name} ${version}\n${license}\n\n${text}`;
  });
  return `${[`tollgate\n${OWN}\n\n${own}`, bun.replaceAll("BUN_VERSION", bunVersion), ...parts].join(RULE)}\n`;
}
