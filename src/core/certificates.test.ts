import { beforeAll, describe, expect, test } from "bun:test";
import { makePki, type Pki } from "../../test/support/http/pki.ts";
import { parseCertificates } from "./certificates.ts";

let pki: Pki;
beforeAll(async () => {
  pki = await makePki();
});

describe("a text with two certificates", () => {
  test("has both, whatever stands between and around them", () => {
    const text = `# of ours\n-----\n${pki.ca.cert}\nand\n${pki.server.key}\n${pki.server.cert}# the end\n`;
    expect(parseCertificates(text)).toHaveLength(2);
  });

  test("has none when it breaks off within the second, wherever that is", () => {
    const first = pki.ca.cert.trim();
    const second = pki.server.cert.trim();
    for (let kept = 1; kept < second.length; kept++) {
      expect(() => parseCertificates(`${first}\n${second.slice(0, kept)}`)).toThrow("without its end");
    }
  });

  test("has none when the first is broken off", () => {
    expect(() => parseCertificates(pki.ca.cert.slice(0, 200) + pki.server.cert)).toThrow("without its end");
  });
});
