// The order of search results: pages whose titles have the words of the query, and guides before the reference.
const WORDS = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().match(/[\p{L}\p{N}]+/gu) || [];
const FOLDERS = {guides: 18, methods: 18, start: 12, tutorials: 12, how_it_works: 10, reference: 0, evidence: 5, decisions: -5};

var Scorer = {
    score: ([page, title, anchor, description, score]) => {
        const words = title.toLowerCase();
        // Without its end, so that "stopping" finds "EarlyStopper".
        const found = WORDS.filter(word => words.includes(word.slice(0, Math.max(4, word.length - 3)))).length;
        const exact = words.split(/[^\p{L}\p{N}]+/u).join(" ") === WORDS.join(" ") ? 10 : 0;
        return 30 * found / Math.max(1, WORDS.length) + exact + (FOLDERS[page.split("/")[0]] ?? 1) + score / 10;
    },
    objNameMatch: 11,
    objPartialMatch: 6,
    objPrio: {0: 15, 1: 5, 2: -5},
    objPrioDefault: 0,
    title: 15,
    partialTitle: 7,
    term: 5,
    partialTerm: 2,
};
