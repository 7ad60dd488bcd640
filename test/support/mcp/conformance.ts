// Runs the official conformance suite against a server, as its users do, and reads what it found.
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { join } from "node:path";
import { temporaryRoot } from "../gateway/process.ts";

const SUITE = join(import.meta.dir, "../../../node_modules/@modelcontextprotocol/conformance/dist/index.js");
const RUN_MS_MAX = 25_000;

export interface Findings {
  /** The scenario and the check, of those that hold. */
  readonly passed: string[];
  /** Those that do not, warnings too, with what the suite says of them. */
  readonly missed: string[];
}

interface Check {
  readonly id: string;
  readonly status: "SUCCESS" | "FAILURE" | "WARNING" | "SKIPPED" | "INFO";
  readonly errorMessage?: string;
}

/** @throws when the suite itself does not come to its end. */
export async function runConformance(url: string): Promise<Findings> {
  const dir = mkdtempSync(join(temporaryRoot(), "conformance-"));
  const args = ["server", "--url", url, "--suite", "all", "--output-dir", dir];
  const suite = Bun.spawn([process.execPath, SUITE, ...args], {
    env: { PATH: "/usr/bin:/bin" },
    stdin: "ignore",
    stdout: "pipe",
    stderr: "pipe",
    timeout: RUN_MS_MAX,
  });
  const [stdout, stderr] = await Promise.all([suite.stdout.text(), suite.stderr.text(), suite.exited]);
  if (!stdout.includes("=== SUMMARY ===")) throw new Error(`the suite broke off:\n${stdout}${stderr}`);
  const findings: Findings = { passed: [], missed: [] };
  for (const result of readdirSync(dir)) {
    const scenario = result.replace(/^server-/, "").replace(/-\d{4}-\d\d-\d\dT[\d-]+Z$/, "");
    const checks: Check[] = JSON.parse(readFileSync(join(dir, result, "checks.json"), "utf8"));
    for (const { id, status, errorMessage } of checks) {
      if (status === "SUCCESS") findings.passed.push(`${scenario}: ${id}`);
      if (status === "FAILURE" || status === "WARNING") {
        findings.missed.push(`${scenario}: ${id}: ${errorMessage}`);
      }
    }
  }
  rmSync(dir, { recursive: true });
  return findings;
}
