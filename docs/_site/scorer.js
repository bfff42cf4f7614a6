// The order of search results: pages whose titles have the words of the query, and guides before the reference.
const WORDS = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase().match(/[\p{L}\p{N}]+/gu) || [];
const FOLDERS = {guides: 18, methods: 18, start: 12, tutorials: 12, how_it_works: 10, reference: 0, evidence: 5, decisions: -5};
// Words for a page that its title does not have.
const SUBJECTS = {
    "methods/activation_checkpointing": "gradient checkpointing",
    "methods/ema": "exponential moving average of the weights",
    "methods/swa": "stochastic average of the weights",
    "guides/stopping_and_going_on": "resume training",
};

var Scorer = {
    score: ([page, title, anchor, description, score]) => {
        const words = `${title} ${anchor ? "" : (SUBJECTS[page] ?? "")}`.toLowerCase();
        // Without its end, so that "stopping" finds "EarlyStopper".
        const found = WORDS.filter(word => words.includes(word.slice(0, Math.max(4, word.length - 3)))).length;
        const exact = title.toLowerCase().split(/[^\p{L}\p{N}]+/u).join(" ") === WORDS.join(" ") ? 10 : 0;
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
