import { afterAll, expect, test } from "bun:test";
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { findAnvil } from "./anvil.ts";

const ROOT = join(import.meta.dir, "..", "..", "..");
const dir = mkdtempSync(join(tmpdir(), "find-anvil-"));
afterAll(() => rmSync(dir, { recursive: true }));

test("a clone of the project has anvil among its packages", () => {
  expect(findAnvil(null, ROOT)).toMatchObject({ anvil: { found: "in node_modules" } });
});

test("the anvil that the operator names is taken, wherever it is, and nothing else in its place", () => {
  const program = join(dir, "my-anvil");
  writeFileSync(program, "#!/bin/sh\n");
  const missing = { missing: expect.arrayContaining(["TOLLGATE_ANVIL names no program that can be run."]) };
  expect(findAnvil(program, ROOT)).toEqual(missing);
  chmodSync(program, 0o755);
  for (const name of [program, "./my-anvil"]) {
    expect(findAnvil(name, dir)).toEqual({ anvil: { path: program, found: "of TOLLGATE_ANVIL" } });
  }
  for (const name of [dir, join(dir, "nowhere"), "no-such-program"]) expect(findAnvil(name, ROOT)).toEqual(missing);
});
