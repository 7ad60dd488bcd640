// `bun run build`: the binary for this machine, and the licences of what is in it.
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import manifest from "../../package.json" with { type: "json" };
import { build, ROOT, tellMade } from "./build.ts";
import { bundledPackages } from "./bundled.ts";
import { licencesFile } from "./licences.ts";

const metafile = build(join(ROOT, "dist/tollgate"), null);
const licences = join(ROOT, "dist/licences.txt");
writeFileSync(licences, licencesFile(bundledPackages(metafile), manifest.engines.bun));
tellMade(licences, "the licences of what is in it");
